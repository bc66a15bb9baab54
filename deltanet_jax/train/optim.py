"""The optimizers and learning rate schedules of a config: AdamW with a cosine and alternatives."""

import math

import jax
import numpy as np
import optax
from optax import contrib

from deltanet_jax.config import TrainConfig
from deltanet_jax.models.abstract import AbstractModel

# Muon's updates are scaled to this RMS, that of AdamW's updates in practice, so that both share one
# learning rate and weight decay (Liu et al. 2025, arXiv:2502.16982).
_MUON_RMS = 0.2


def learning_rate(cfg: TrainConfig, step: int | float) -> np.float32:
  """Return the learning rate of update `step`, counted from 0: linear warmup, then the schedule.

  It is constant between multiples of `rate_every`.
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
  match opt.schedule:
    case "constant":
      return np.float32(highest)
    case "wsd":
      start = max(total * (1 - opt.decay_fraction), warmup)
      done = min(max((step - start) / max(total - start, 1e-9), 0.0), 1.0)
      return np.float32(highest + (last - highest) * done)
  done = min((step - warmup) / max(total - warmup, 1e-9), 1.0)
  return np.float32(last + (highest - last) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(cfg: TrainConfig, model: AbstractModel) -> optax.GradientTransformation:
  """Return the optimizer of a config, with gradient clipping and weight decay.

  It returns descent directions without the learning rate: `Trainer.update` subtracts them times
  the learning rate.
  """
  opt = cfg.optimizer
  clip = optax.identity() if opt.clip is None else optax.clip_by_global_norm(opt.clip)
  adam = optax.scale_by_adam(opt.b1, opt.b2, opt.eps)
  match opt.name:
    case "muon":
      labels = {name: "muon" if is_matrix(model, name) else "adam" for name in model.shapes}
      direction = optax.partition({"muon": _muon(opt.momentum), "adam": adam}, labels)
    case "lion":
      direction = optax.scale_by_lion(opt.b1, opt.b2)
    case "adafactor":
      # optax.adafactor without its learning rate. Stacked layers share one RMS.
      direction = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
      )
    case _:
      direction = adam
  decayed = None if opt.decay_all else model.decays
  return optax.chain(clip, direction, optax.add_decayed_weights(opt.weight_decay, mask=decayed))


def is_matrix(model: AbstractModel, name: str) -> bool:
  """Whether Muon updates this weight: a projection, not an embedding, the head or a convolution."""
  axes = [axis for axis in model.axes[name] if axis != "layers"]
  parts = name.split(".")
  return (
    len(axes) == 2
    and model.decays[name]
    and "vocab" not in axes
    and parts[0] != "positions"
    and not any(part.endswith("conv") for part in parts)
  )


def _muon(momentum: float) -> optax.GradientTransformation:
  # The last two axes are the matrix; a leading axis stacks layers.
  numbers = lambda weights: jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), weights)
  scale = lambda x: x * (_MUON_RMS * math.sqrt(max(x.shape[-2:])))
  return optax.chain(
    contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=numbers),
    optax.stateless(lambda updates, _: jax.tree.map(scale, updates)),
  )
