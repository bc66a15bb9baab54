"""ABC and GSA: keys and values are averaged into memory slots, to which queries attend."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import (
  QKV,
  HeadOutput,
  Linear,
  RMSNorm,
  merge_heads,
  rope,
  split_heads,
)
from deltanet_jax.mixers.matrix_state import attend, head_sizes
from deltanet_jax.ops import logcumsumexp
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype, upcast
from deltanet_jax.ops.logcumsumexp import EMPTY
from deltanet_jax.ops.segments import segment_positions, segment_starts
from deltanet_jax.sharding import locally


@settings
class ABCConfig(MixerConfig):
  kind: ClassVar[str] = "abc"

  heads: int = setting(4, "Number of heads.")
  expand_k: float = setting(0.5, "Total key width of all heads over the model width.")
  expand_v: float = setting(1.0, "Total value width of all heads over the model width.")
  slots: int = setting(64, "Memory slots per head.")
  clamp: float = setting(32.0, "Slot logits are clipped to [-clamp, clamp].")
  rope_base: float = setting(10000.0, "Base of the rotary position embedding.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "heads", "expand_k", "expand_v", "slots", "clamp", "rope_base")
    check_chunk(self.chunk)


@settings
class GSAConfig(MixerConfig):
  kind: ClassVar[str] = "gsa"

  heads: int = setting(4, "Number of heads.")
  expand_k: float = setting(1.0, "Total key width of all heads over the model width.")
  expand_v: float = setting(1.0, "Total value width of all heads over the model width.")
  slots: int = setting(64, "Memory slots per head.")
  gate_temperature: float = setting(
    8.0, "Temperature of the decay: log decay = log_sigmoid(logit) / temperature."
  )
  norm_eps: float = setting(1e-5, "Epsilon of the output norm, which is over all heads together.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "heads", "expand_k", "expand_v", "slots", "gate_temperature", "norm_eps")
    check_chunk(self.chunk)


class SlotMixer(Mixer):
  """o_t = softmax(q_t Sk_t) Sv_t, with Sk `[dk M]` and Sv `[M dv]` for M slots with one decay each.

  "S" in the decoding state is (Sk, Sv).
  """

  operator = "linear_attention"
  efficient_form = "two passes, chunkwise, two levels"
  kernels = "Pallas on GPU, TPU in one pass"

  def __init__(self, cfg, width, *, std, rngs):
    self.cfg = cfg
    self.heads, self.key_size, self.value_size = H, dk, dv = head_sizes(cfg, width)
    self.qkv = QKV(width, H * dk, H * dv, 0, std=std, rngs=rngs)
    self.slots = Linear((width, H * cfg.slots), ("embed", "heads"), std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    zeros = lambda rows, columns: jnp.zeros((batch, self.heads, rows, columns), accum_dtype(dtype))
    return dict(S=(zeros(self.key_size, self.cfg.slots), zeros(self.cfg.slots, self.value_size)))

  def recurrent_state(self):
    return self.heads * self.cfg.slots * (self.key_size + self.value_size)

  def flops(self, length):
    """FLOPs of two chunkwise passes: scores, outputs and state of each."""
    sizes, M, C = self.key_size + self.value_size, self.cfg.slots, min(self.cfg.chunk, length)
    return 2 * self.heads * (C * (sizes + 2 * M) + 2 * M * sizes)

  def attend_to_slots(self, q, k, v, phi, g, segment_ids, state, *, scale):
    """Return (o, S).

    Args:
      phi: `[B L H M]`, weight with which a token is written to each slot.
      g: `[B L H M]`, log decay of each slot.
    """
    S = (None, None) if state is None else state["S"]
    chunk = self.cfg.chunk
    # phi has the accumulation dtype, so the logits have it too.
    y, Sk = attend(q, k, phi, S[0], segment_ids, h=g, scale=scale, chunk=chunk)
    p = jax.nn.softmax(y, axis=-1)
    o, Sv = attend(p, phi, v, S[1], segment_ids, g=g, scale=1.0, chunk=chunk)
    return o, (Sk, Sv)


class ABC(SlotMixer):
  """Each slot is the mean of all tokens so far, weighted by e^{s_t}; scores are scaled by dk^-1/2.

  With z_t = log sum_{i<=t} e^{s_i}, a token has weight e^{s_t - z_t} and the slot decays by
  e^{z_{t-1} - z_t}.
  """

  Config = ABCConfig
  recurrence = "Sᵏ_t = Sᵏ_{t-1} + k_t φ_tᵀ, Sᵛ_t = Sᵛ_{t-1} + v_t φ_tᵀ"
  readout = "o_t = Sᵛ_t softmax(Sᵏ_t q_t)"

  def __init__(self, cfg: ABCConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    super().__init__(cfg, width, std=std, rngs=rngs)
    self.output = HeadOutput(width, self.heads, self.value_size, True, eps=eps, std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    z = jnp.full((batch, self.heads, self.cfg.slots), EMPTY, accum_dtype(dtype))
    position = jnp.zeros((batch,), jnp.int32)
    return super().init_state(batch, max_length, dtype) | dict(z=z, position=position)

  def mix(self, x, segment_ids, state):
    cfg, B, L = self.cfg, *x.shape[:2]
    (q, k, v), _ = self.qkv(x, segment_ids, None)
    s = jnp.clip(upcast(self.slots(x)), -cfg.clamp, cfg.clamp)
    q, k, v, s = (split_heads(y, self.heads) for y in (q, k, v, s))
    start = jnp.zeros((B,), jnp.int32) if state is None else state["position"]
    position = segment_positions(start, L, segment_ids)
    q, k = (rope(y, position, cfg.rope_base) for y in (q, k))
    tokens = ("batch", None, "mixing_heads", None)
    names = (tokens, ("batch", "mixing_heads", None), ("batch", None))
    arguments = (s, None if state is None else state["z"], segment_ids)
    z, g = locally(_sums_and_decay, arguments, names, (tokens, tokens))
    scale = self.key_size**-0.5
    o, S = self.attend_to_slots(q, k, v, jnp.exp(s - z), g, segment_ids, state, scale=scale)
    if state is not None:
      state = dict(S=S, z=z[:, -1], position=position[:, -1] + 1)
    return self.output(o, x), state


def _sums_and_decay(s, z0, segment_ids):
  """Return z_t and the log decay z_{t-1} - z_t, which is 0 at the first token of a segment."""
  z = logcumsumexp(s, z0=z0, segment_ids=segment_ids)
  z0 = jnp.full_like(z[:, 0], EMPTY) if z0 is None else z0
  before = jnp.concatenate([z0[:, None], z[:, :-1]], axis=1)
  if segment_ids is not None:
    before = jnp.where(segment_starts(segment_ids)[:, :, None, None], EMPTY, before)
  return z, jnp.where(before == EMPTY, 0, before - z)


class GSA(SlotMixer):
  """Each slot is an exponential moving average with decay e^{g_t} and input weight 1 - e^{g_t}."""

  Config = GSAConfig
  recurrence = "Sᵏ_t = Sᵏ_{t-1} Diag(α_t) + k_t φ_tᵀ, Sᵛ_t = Sᵛ_{t-1} Diag(α_t) + v_t φ_tᵀ"
  readout = "o_t = Sᵛ_t softmax(Sᵏ_t q_t)"

  def __init__(self, cfg: GSAConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    del eps  # the output norm has its own
    super().__init__(cfg, width, std=std, rngs=rngs)
    inner = self.heads * self.value_size
    self.norm = RMSNorm(inner, "heads", eps=cfg.norm_eps)
    self.out = Linear((inner, width), ("heads", "embed"), std=std, rngs=rngs)

  def mix(self, x, segment_ids, state):
    (q, k, v), _ = self.qkv(x, segment_ids, None)
    g = jax.nn.log_sigmoid(upcast(self.slots(x))) / self.cfg.gate_temperature
    q, k, v = (jax.nn.silu(y) for y in (q, k, v))
    q, k, v, g = (split_heads(y, self.heads) for y in (q, k, v, g))
    o, S = self.attend_to_slots(q, k, v, -jnp.expm1(g), g, segment_ids, state, scale=1.0)
    y = self.out(self.norm(jax.nn.silu(merge_heads(o))))
    return y, None if state is None else dict(S=S)
