"""Hyena and Multihead Hyena: gated long convolutions whose filters are implicit (small MLPs)."""

import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from deltanet_jax.config import MixerConfig, check, check_positive, setting, settings
from deltanet_jax.mixers.base import Mixer, count_heads
from deltanet_jax.mixers.layers import (
  Linear,
  ShortConv,
  merge_heads,
  normal,
  param,
  split_heads,
)
from deltanet_jax.ops import layer_state, long_conv, long_conv_attention
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.long_conv.fft import conv_flops
from deltanet_jax.ops.segments import number_segments, segment_positions
from deltanet_jax.sharding import locally

_TOKENS, _FILTER, _SEGMENTS = (
  ("batch", None, "mixing_heads"),
  (None, "mixing_heads"),
  ("batch", None),
)


@settings
class HyenaConfig(MixerConfig):
  kind: ClassVar[str] = "hyena"

  length: int = setting(2048, "Length of the long convolution filter in tokens.")
  conv: int = setting(3, "Kernel width of the short convolution.")
  features: int = setting(
    33, "Positional features of the filter network: the position, cosines and sines; odd."
  )
  filter_width: int = setting(64, "Hidden size of the filter network.")
  frequency: float = setting(14.0, "Initial frequency of the filter network's sine activations.")

  def validate(self):
    check_positive(self, "length", "filter_width", "frequency")
    check(self.conv > 1, f"conv is {self.conv}, expected a width above 1.")
    check(
      self.features % 2 and self.features > 1, f"features is {self.features}, expected 3, 5, .."
    )


@settings
class MultiheadHyenaConfig(HyenaConfig):
  kind: ClassVar[str] = "multihead_hyena"

  head_size: int = setting(16, "Key and value size per head; each head has one filter.")

  def validate(self):
    HyenaConfig.validate(self)
    check_positive(self, "head_size")


class Filter(nnx.Module):
  """Implicit filters h_s: an MLP of the position s with sine activations, times a window."""

  def __init__(self, cfg, filters, *, std, rngs):
    self.cfg, self.filters = cfg, filters
    width = cfg.filter_width
    weight = lambda i, o: param(normal(rngs, (i, o), std), None, None, decays=False)
    self.kernels = nnx.List([weight(i, width) for i in (cfg.features, width, width)])
    self.biases = nnx.List([param(jnp.zeros(width), None) for _ in self.kernels])
    self.frequency = param(jnp.full(width, cfg.frequency), None)
    self.last = weight(width, filters)

  def __call__(self, taps, dtype):
    """Return h `[taps filters]`, zero from index `cfg.length` on."""
    length = self.cfg.length
    t = np.linspace(0, 1, length)[: min(taps, length), None]
    bands = (self.cfg.features - 1) // 2
    angle = 2 * math.pi * np.arange(len(t))[:, None] / length * np.linspace(1e-4, bands - 1, bands)
    x = jnp.asarray(np.concatenate([t, np.cos(angle), -np.sin(angle)], axis=1), dtype)
    over_taps = lambda w: w[...].astype(dtype)[None]
    for kernel, bias in zip(self.kernels, self.biases):
      x = jnp.sin(over_taps(self.frequency) * (x @ kernel[...].astype(dtype) + over_taps(bias)))
    # The windows decay to 1 % at 1.5 times the length (first filter) to 0.3 times it (last).
    rates = np.abs(np.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, self.filters))
    h = (x @ self.last[...].astype(dtype)) * jnp.asarray(np.exp(-t * rates), dtype)
    return jnp.pad(h, ((0, taps - len(t)), (0, 0)))


class _LongConvMixer(Mixer):
  """Projections, short convolution and long convolution; decoding stores its full input history."""

  operator = "long_conv"
  efficient_form = "FFT by halves"
  decode = "history"
  in_place = ("history", "filter")
  history_ratio: ClassVar[int]  # channels in the history over the model width

  def _build(self, cfg, width, filters, *, std, rngs):
    self.cfg, self.width = cfg, width
    make = lambda size: Linear((width, size), ("embed", "heads"), std=std, rngs=rngs, bias=True)
    self.into = make(3 * width)
    self.conv = ShortConv(cfg.conv, 3 * width, "heads", std=std, rngs=rngs, bias=True)
    self.filter = Filter(cfg, filters, std=std, rngs=rngs)
    self.bias = param(normal(rngs, (filters,), 1.0), "heads")
    self.out = Linear((width, width), ("heads", "embed"), std=std, rngs=rngs, bias=True)

  def init_state(self, batch, max_length, dtype):
    """The state includes the filter: evaluating its MLP per token would dominate decoding."""
    return dict(
      history=jnp.zeros((batch, max_length, self.history_ratio * self.width), dtype),
      filter=self.filter(max_length, accum_dtype(dtype)),
      conv=self.conv.init_state(batch, dtype),
      index=jnp.zeros((), jnp.int32),
      position=jnp.zeros((batch,), jnp.int32),
    )

  def recurrent_state(self):
    return None

  def mix(self, x, segment_ids, state):
    before = None if state is None else state["conv"]
    y, conv = self.conv(self.into(x), before, segment_ids)
    read, *written = jnp.split(y, 3, axis=-1)
    written = self.write(*written)
    accum, L = accum_dtype(x.dtype), x.shape[1]
    if state is None:
      # The skip connection b adds to tap 0 of the filter.
      h = self.filter(L, accum).at[0].add(self.bias[...].astype(accum))
      return self.out(self.convolve(read, written, h, segment_ids)), None
    n, M = state["index"], state["history"].shape[1]
    history = layer_state.write_at(state["history"], written.astype(state["history"].dtype), n, 1)
    held = layer_state.read(history).astype(x.dtype)
    h = layer_state.read(state["filter"]).at[0].add(self.bias[...].astype(accum))
    # Segment numbers in the history: 0 for the segment that continues, -1 for earlier ones.
    slot = jnp.arange(M, dtype=jnp.int32)[None]
    numbers = (slot >= n - state["position"][:, None]).astype(jnp.int32) - 1
    if L == 1:
      y = self.read(read[:, 0], jnp.where((numbers == 0)[..., None], held, 0), h, n)[:, None]
    else:
      ids = jnp.zeros(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids
      numbers = layer_state.write_at(numbers, number_segments(ids), n, 1)
      padded = layer_state.write_at(jnp.zeros((*x.shape[:1], M, self.width), x.dtype), read, n, 1)
      y = self.convolve(padded, held, h, numbers)
      y = lax.dynamic_slice_in_dim(y, n, L, axis=1)
    position = segment_positions(state["position"], L, segment_ids)[:, -1] + 1
    new = dict(history=history, filter=state["filter"], conv=conv, index=n + L, position=position)
    return self.out(y), new


class Hyena(_LongConvMixer):
  """y = x_1 * (h (*) z + b z), z = x_2 * v; (*) is a causal convolution per channel."""

  Config = HyenaConfig
  recurrence = "Z_t = [Z_{t-1}; k_t ⊙ v_t]"
  readout = "o_t = q_t ⊙ Σ_s h_s ⊙ z_{t-s}"
  history_ratio = 1

  def __init__(self, cfg: HyenaConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    del eps  # no norm in this mixer
    self._build(cfg, width, width, std=std, rngs=rngs)

  def write(self, x, v):
    """Return the input of the long convolution."""
    return x * v

  def convolve(self, read, written, h, segment_ids):
    """Return the gated long convolution of `written`."""
    run = lambda u, h, ids: (long_conv(u, h, segment_ids=ids),)
    names = (_TOKENS, _FILTER, _SEGMENTS)
    (y,) = locally(run, (written, h, segment_ids), names, (_TOKENS,))
    return read * y

  def read(self, q, held, h, n):
    """Decode one token, at index n."""
    y = jnp.einsum("bmd,md->bd", held.astype(h.dtype), _taps_at(n, h))
    return q * y.astype(q.dtype)

  def flops(self, length):
    return self.width * conv_flops(length)


class MultiheadHyena(_LongConvMixer):
  """o_t = q_t Z_t, Z_t = sum_s h_s k_{t-s}^T v_{t-s} + b k_t^T v_t, one filter per head."""

  Config = MultiheadHyenaConfig
  recurrence = "Z_t = [Z_{t-1}; v_t k_tᵀ]"
  readout = "o_t = Σ_s h_s Z_{t-s} q_t"
  history_ratio = 2

  def __init__(
    self, cfg: MultiheadHyenaConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs
  ):
    del eps  # no norm in this mixer
    self.heads = count_heads(width, head_size=cfg.head_size)
    self._build(cfg, width, self.heads, std=std, rngs=rngs)

  def write(self, k, v):
    return jnp.concatenate([k, v], axis=-1)

  def convolve(self, read, written, h, segment_ids):
    run = lambda q, k, v, h, ids: (long_conv_attention(q, k, v, h, segment_ids=ids),)
    tokens = (*_TOKENS, None)
    names = (tokens, tokens, tokens, _FILTER, _SEGMENTS)
    q, k, v = (split_heads(y, self.heads) for y in (read, *jnp.split(written, 2, axis=-1)))
    (o,) = locally(run, (q, k, v, h, segment_ids), names, (tokens,))
    return merge_heads(o)

  def read(self, q, held, h, n):
    """Decode one token, at index n."""
    k, v = (split_heads(y, self.heads).astype(h.dtype) for y in jnp.split(held, 2, axis=-1))
    q_heads = q.reshape(q.shape[0], self.heads, -1).astype(h.dtype)
    weights = jnp.einsum("bhn,bmhn->bmh", q_heads, k) * _taps_at(n, h)[None]
    return jnp.einsum("bmh,bmhn->bhn", weights, v).reshape(q.shape).astype(q.dtype)

  def flops(self, length):
    # For each key channel: product with the values, convolution, product with the queries, sum.
    return self.width * self.cfg.head_size * (conv_flops(length) + 3)


def _taps_at(n, h):
  """Return h_{n-j} for every slot j of the history, 0 for j > n."""
  M = h.shape[0]
  back = n - jnp.arange(M, dtype=jnp.int32)
  return h.at[jnp.where(back < 0, M, back)].get(mode="fill", fill_value=0)
