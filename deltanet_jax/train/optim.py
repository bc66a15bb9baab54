"""AdamW and the learning rate schedule of the paper."""

import math

import numpy as np
import optax

from deltanet_jax.config import TrainConfig


def learning_rate(cfg: TrainConfig, step: int | float) -> np.float32:
  """Return the learning rate of update `step`, counted from 0: linear warmup, then cosine decay.

  It is constant if `final_learning_rate` equals `learning_rate`, and between multiples of
  `rate_every`.
  """
  opt = cfg.optimizer
  first, highest = opt.initial_learning_rate, opt.learning_rate
  last = opt.final_learning_rate
  per_step = cfg.data.batch * cfg.data.length
  warmup, total = opt.warmup_tokens / per_step, cfg.tokens / per_step
  if opt.rate_every > 1:
    step -= step % opt.rate_every
  if step < warmup:
    return np.float32(first + (highest - first) * step / warmup)
  done = min((step - warmup) / max(total - warmup, 1e-9), 1.0)
  return np.float32(last + (highest - last) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(cfg: TrainConfig, decayed: dict[str, bool]) -> optax.GradientTransformation:
  """Return AdamW with gradient clipping, without the learning rate, which `update` multiplies by.

  Args:
    decayed: by weight name, whether it has weight decay; ignored if `decay_all` is set.
  """
  opt = cfg.optimizer
  clip = optax.identity() if opt.clip is None else optax.clip_by_global_norm(opt.clip)
  return optax.chain(
    clip,
    optax.scale_by_adam(opt.b1, opt.b2, opt.eps),
    optax.add_decayed_weights(opt.weight_decay, mask=None if opt.decay_all else decayed),
  )
