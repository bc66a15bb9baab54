"""What the matrix-state mixers share: q, k, v with short convolutions, normed and gated output."""

import jax
from flax import nnx

from deltanet_jax.mixers.layers import Linear, RMSNorm, ShortConv, merge_heads, split_heads
from deltanet_jax.ops import delta_rule, delta_rule_step, linear_attention, rms_norm, slot
from deltanet_jax.sharding import locally

# Names of the axes of [B L H d], of a state [B H dk dv] and of [B L] while tokens are mixed.
_TOKENS = ("batch", None, "mixing_heads", None)
_STATE = ("batch", "mixing_heads", None, None)
_SEGMENTS = ("batch", None)


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
    self.norm = RMSNorm(value_size, None, eps=eps)
    self.gate = Linear((width, inner), ("embed", "heads"), std=std, rngs=rngs) if gate else None
    self.out = Linear((inner, width), ("heads", "embed"), std=std, rngs=rngs)

  def __call__(self, o, x):
    """o `[B L H dv]` of the recurrence and the mixer's input x give y `[B L D]`."""
    scale, eps = self.norm.scale[...], self.norm.eps
    norm = lambda o, scale: rms_norm(o, scale, eps)
    o = per_head(norm, merge_heads(o.astype(x.dtype)), scale.shape[0], scale)
    if self.gate is not None:
      o = o * jax.nn.silu(self.gate(x))
    return self.out(o)


def per_head(norm, x, size, *weights):
  """norm(x, *weights) of x `[B L H·size]`, by each device for its own heads."""

  def run(x, *weights):
    return (split_heads(norm(merge_heads(x), *weights), x.shape[2]),)

  # Split by heads, so that none is cut in two; the channels stay where they are.
  heads = ("batch", "length", "heads", None)
  names = (heads, *((None,) * w.ndim for w in weights))
  (y,) = locally(run, (split_heads(x, x.shape[2] // size), *weights), names, (heads,))
  return merge_heads(y)


def run_delta_rule(cfg, q, k, v, beta, g, segment_ids, state):
  """(o, S) of the delta rule as `cfg` has it, from "S" of the state or from nothing."""
  beta = 2 * beta if cfg.negative_eigenvalues else beta
  scale = cfg.key_size**-0.5
  if state is not None and q.shape[1] == 1:
    # Decoding has kernels of its own; they are not differentiable, and nobody trains on one token.
    plain = cfg.implementation in ("recurrent", "chunkwise", "parallel")
    form = "recurrent" if plain else "by_platform" if cfg.implementation == "by_platform" else None
    token = (x[:, 0] for x in (q, k, v, beta))
    g_t = None if g is None else g[:, 0]
    o, S = delta_rule_step(*token, state["S"], g_t, scale=scale, implementation=form)
    return o[:, None], S

  def run(q, k, v, beta, g, S0, segment_ids):
    options = dict(scale=scale, chunk=cfg.chunk, implementation=cfg.implementation)
    return delta_rule(q, k, v, beta, g=g, S0=S0, segment_ids=segment_ids, **options)

  S0 = None if state is None else slot.read(state["S"])
  names = (*(_TOKENS,) * 3, _TOKENS[:3], _TOKENS[:3], _STATE, _SEGMENTS)
  o, S = locally(run, (q, k, v, beta, g, S0, segment_ids), names, (_TOKENS, _STATE))
  return o, S if state is None else slot.write(state["S"], S)


def run_linear_attention(cfg, q, k, v, g, segment_ids, state):
  """(o, S) of decayed linear attention, from "S" of the state or from nothing."""

  def run(q, k, v, g, S0, segment_ids):
    form = "recurrent" if q.shape[1] == 1 else None
    options = dict(scale=q.shape[-1] ** -0.5, chunk=cfg.chunk, implementation=form)
    return linear_attention(q, k, v, g=g, S0=S0, segment_ids=segment_ids, **options)

  S0 = None if state is None else state["S"]
  names = (*(_TOKENS,) * 3, _TOKENS[: g.ndim], _STATE, _SEGMENTS)
  return locally(run, (q, k, v, g, S0, segment_ids), names, (_TOKENS, _STATE))


def chunk_flops(heads, dk, dv, chunk, length, *, delta):
  """Operations per token of the chunkwise form: scores, outputs and state; WY terms if `delta`."""
  C = min(chunk or 64, length)
  products = C * dk + C * dv + 2 * dk * dv
  if delta:
    # K K^T, the inverse (C^3 / 3), X times values, and K S.
    products += C * dk + C * C / 3 + C * dv + dk * dv
  return 2 * heads * products
