"""mLSTM (xLSTM): linear attention with an exponential input gate and a normalizer."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.layers import QKV, HeadLayerNorm, Linear, param, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer, head_sizes
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.segments import segment_starts


@settings
class MLSTMConfig(MixerConfig):
  kind: ClassVar[str] = "mlstm"

  heads: int = setting(4, "Number of heads.")
  expand_k: float = setting(0.5, "Total key width of all heads over the model width.")
  expand_v: float = setting(1.0, "Total value width of all heads over the model width.")
  gate_cap: float = setting(15.0, "Soft cap of the gate logits: cap * tanh(logit / cap).")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "heads", "expand_k", "expand_v", "gate_cap")
    check_chunk(self.chunk)


class MLSTM(LinearAttentionMixer):
  """S_t = f_t S_{t-1} + i_t k_t^T v_t, o_t = q_t S_t / max(|q_t z_t|, 1).

  The normalizer is z_t = f_t z_{t-1} + i_t k_t; f is the sigmoid and i the exponential of its
  logit. S and z are stored divided by e^{m_t}, m_t = max(log f_t + m_{t-1}, log i_t), so that no
  exponent is positive.
  """

  Config = MLSTMConfig
  recurrence = "S_t = f_t S_{t-1} + i_t v_t k_tᵀ, z_t = f_t z_{t-1} + i_t k_t"
  readout = "o_t = S_t q_t / max{1, |z_tᵀ q_t|}"
  normalized = True

  def __init__(self, cfg: MLSTMConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    self.cfg = cfg
    self.heads, self.key_size, self.value_size = H, dk, dv = head_sizes(cfg, width)
    self.qkv = QKV(width, H * dk, H * dv, 0, std=std, rngs=rngs)
    # Zero weights: initial gates are their biases, with a slow decay and a small input gate.
    make = lambda size, axis: Linear((width, size), ("embed", axis), std=0.0, rngs=rngs)
    self.input, self.forget = make(H, None), make(H, None)
    self.input_bias = param(jnp.full(H, -10.0), None)
    self.forget_bias = param(jnp.linspace(3.0, 6.0, H), None)
    self.gate = make(H * dv, "heads")
    self.norm = HeadLayerNorm(H, dv, eps=eps, bias=False)
    self.out = Linear((H * dv, width), ("heads", "embed"), std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    m = jnp.zeros((batch, self.heads), accum_dtype(dtype))
    return super().init_state(batch, max_length, dtype) | dict(m=m)

  def mix(self, x, segment_ids, state):
    accum, H = accum_dtype(x.dtype), self.heads
    (q, k, v), _ = self.qkv(x, segment_ids, None)
    q, k, v = (split_heads(y, H) for y in (q, k, v))

    def capped(gate, bias):
      logit = gate(x).astype(accum) + bias[...].astype(accum)[None, None]
      return self.cfg.gate_cap * jnp.tanh(logit / self.cfg.gate_cap)

    log_i = capped(self.input, self.input_bias)
    log_f = jax.nn.log_sigmoid(capped(self.forget, self.forget_bias))
    m0 = jnp.zeros_like(log_i[:, 0]) if state is None else state["m"]
    before, m = running_max(log_f, log_i, m0, segment_ids)
    k = (jnp.exp(log_i - m)[..., None] * k.astype(accum)).astype(x.dtype)
    # Rounding may make a decay larger than 1.
    g = jnp.minimum(log_f + before - m, 0)
    o, n, state = self.run_normalized(q, k, v, g, segment_ids, state)
    n = jnp.maximum(jnp.abs(n), jnp.exp(-m)[..., None]) + 1e-6
    y = self.out(jax.nn.sigmoid(self.gate(x)) * self.norm((o / n).astype(x.dtype)))
    return y, None if state is None else state | dict(m=m[:, -1])


def running_max(log_f, log_i, m0, segment_ids):
  """Return (m_{t-1}, m_t), m_t = max(log_f_t + m_{t-1}, log_i_t); m is 0 before each segment.

  Args:
    m0: `[B H]`, m before the first token.
  """
  before = jnp.pad(m0[:, None], ((0, 0), (0, log_f.shape[1] - 1), (0, 0)))
  begins = (jnp.arange(log_f.shape[1]) == 0)[None]
  if segment_ids is not None:
    begins = begins | segment_starts(segment_ids)
  begins = begins[..., None]
  begins = jnp.broadcast_to(begins, log_f.shape)
  fresh = jnp.maximum(log_f + before, log_i)

  def combine(one, two):
    # A segment start is independent of all earlier tokens, even if these are NaN.
    m = jnp.where(two[2], two[1], jnp.maximum(one[1] + two[0], two[1]))
    return one[0] + two[0], m, one[2] | two[2]

  elements = jnp.where(begins, 0, log_f), jnp.where(begins, fresh, log_i), begins
  _, m, _ = lax.associative_scan(combine, elements, axis=1)
  shifted = jnp.concatenate([m0[:, None], m[:, :-1]], axis=1)
  return jnp.where(begins, before, shifted), m
