"""What the matrix-state mixers share: q, k, v with short convolutions, normed and gated output."""

import jax
from flax import nnx

from deltanet_jax.mixers.layers import Linear, RMSNorm, ShortConv, merge_heads, split_heads


class QKV(nnx.Module):
  """Projections to q, k and v, each followed by a short convolution if `conv` > 0."""

  def __init__(self, width, key_width, value_width, conv, *, std, rngs):
    make = lambda size: Linear((width, size), ("embed", "heads"), std=std, rngs=rngs)
    self.q, self.k, self.v = make(key_width), make(key_width), make(value_width)
    make = lambda size: ShortConv(conv, size, "heads", std=std, rngs=rngs)
    self.q_conv = make(key_width) if conv else None
    self.k_conv = make(key_width) if conv else None
    self.v_conv = make(value_width) if conv else None

  def init_state(self, batch, dtype):
    """The convolutions' states by name, none without convolutions."""
    if self.q_conv is None:
      return {}
    convs = dict(q_conv=self.q_conv, k_conv=self.k_conv, v_conv=self.v_conv)
    return {name: conv.init_state(batch, dtype) for name, conv in convs.items()}

  def __call__(self, x, segment_ids, state):
    """((q, k, v), convolution states), before any activation."""
    out, states = [], {}
    for name, proj in (("q", self.q), ("k", self.k), ("v", self.v)):
      y, conv = proj(x), getattr(self, f"{name}_conv")
      if conv is not None:
        before = None if state is None else state[f"{name}_conv"]
        y, states[f"{name}_conv"] = conv(y, before, segment_ids)
      out.append(y)
    return out, states


class HeadOutput(nnx.Module):
  """RMSNorm per head, times silu of a gate if there is one, and the output projection."""

  def __init__(self, width, heads, value_size, gate, *, eps, std, rngs):
    inner = heads * value_size
    self.heads = heads
    self.norm = RMSNorm(value_size, None, eps=eps)
    self.gate = Linear((width, inner), ("embed", "heads"), std=std, rngs=rngs) if gate else None
    self.out = Linear((inner, width), ("heads", "embed"), std=std, rngs=rngs)

  def __call__(self, o, x):
    """o `[B L H dv]` of the recurrence and the mixer's input x give y `[B L D]`."""
    o = self.norm(o.astype(x.dtype))
    if self.gate is not None:
      o = o * jax.nn.silu(split_heads(self.gate(x), self.heads))
    return self.out(merge_heads(o))


def chunk_flops(heads, dk, dv, chunk, delta):
  """Operations per token of the chunkwise form: scores, outputs and state; WY terms if `delta`."""
  products = chunk * dk + chunk * dv + 2 * dk * dv
  if delta:
    # K K^T, the inverse (C^3 / 3), X times values, and K S.
    products += chunk * dk + chunk * chunk / 3 + chunk * dv + dk * dv
  return 2 * heads * products
