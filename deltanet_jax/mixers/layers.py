"""Modules that mixers and models are built from: projections, norms, short convolutions, MLPs.

Every weight has logical axis names, which determine its sharding, and a weight-decay flag.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from deltanet_jax import ops
from deltanet_jax.ops import head_norm, layer_norm, rms_norm, short_conv, short_convs
from deltanet_jax.ops.epilogue import IDENTITY, Epilogue
from deltanet_jax.ops.matmul import matmul, matmuls
from deltanet_jax.ops.short_conv import has_short_convs
from deltanet_jax.sharding import locally, splits

# Logical axes of [B L H d] in per-head norms: sharded over tokens and heads, never within a head.
_HEADS = ("batch", "length", "heads", None)


def param(value: Array, *axes: str | None, decays: bool | None = None) -> nnx.Param:
  """Create a float32 weight with one logical axis name per dimension (None: never sharded).

  Args:
    decays: whether weight decay applies; None: to matrices, not to vectors (norms, biases).
  """
  assert value.ndim == len(axes), (value.shape, axes)
  decays = value.ndim > 1 if decays is None else decays
  return nnx.Param(value.astype(jnp.float32), axes=axes, decays=decays)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> Array:
  return std * jax.random.normal(rngs.params(), shape, jnp.float32)


def dt_bias(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
  """Initial b with softplus(b) log-uniform between 0.001 and 0.1."""
  u = jax.random.uniform(rngs.params(), shape, jnp.float32)
  dt = jnp.exp(u * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3))
  return dt + jnp.log(-jnp.expm1(-dt))


def split_heads(x: Float[Array, "B L d"], heads: int) -> Float[Array, "B L H dh"]:
  return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def merge_heads(x: Float[Array, "B L H dh"]) -> Float[Array, "B L d"]:
  return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


class Linear(nnx.Module):
  """x W (+ b) in x's dtype."""

  def __init__(self, shape, axes, *, std, rngs, bias=False):
    self.kernel = param(normal(rngs, shape, std), *axes)
    self.bias = param(jnp.zeros(shape[1]), axes[1]) if bias else None

  def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
    y = matmul(x, self.kernel[...])
    if self.bias is None:
      return y
    bias = self.bias[...].astype(x.dtype)
    return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


class LowRank(nnx.Module):
  """act(x A) B (+ b), where A has `rank` columns and initial standard deviation `down_std`.

  The default of `down_std` is `std`, that of B.
  """

  def __init__(self, width, rank, size, *, std, rngs, bias=False, act=None, down_std=None):
    down_std = std if down_std is None else down_std
    self.down = Linear((width, rank), ("embed", None), std=down_std, rngs=rngs)
    self.up = Linear((rank, size), (None, "heads"), std=std, rngs=rngs, bias=bias)
    self.act = act

  def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L d"]:
    return self.from_down(self.down(x))

  def from_down(self, y: Float[Array, "B L r"]) -> Float[Array, "B L d"]:
    """act(y) B (+ b), for y = x A computed elsewhere."""
    return self.up(y if self.act is None else self.act(y))


class SwiGLU(nnx.Module):
  """(silu(x W_gate) * (x W_up)) W_down."""

  def __init__(self, width, inner, *, std, rngs):
    up = dict(shape=(width, inner), axes=("embed", "mlp"), std=std, rngs=rngs)
    self.gate, self.up = Linear(**up), Linear(**up)
    self.down = Linear((inner, width), ("mlp", "embed"), std=std, rngs=rngs)

  def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class GeluMLP(nnx.Module):
  """gelu(x W_up + b) W_down + b', with the tanh approximation of GELU."""

  def __init__(self, width, inner, *, std, rngs):
    options = dict(std=std, rngs=rngs, bias=True)
    self.up = Linear((width, inner), ("embed", "mlp"), **options)
    self.down = Linear((inner, width), ("mlp", "embed"), **options)

  def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    return self.down(jax.nn.gelu(self.up(x), approximate=True))


class RMSNorm(nnx.Module):
  """scale x / sqrt(mean(x^2) + eps) over the last axis."""

  def __init__(self, size, axis, *, eps):
    self.scale = param(jnp.ones(size), axis)
    self.eps = eps

  def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return rms_norm(x, self.scale[...], self.eps)


class LayerNorm(nnx.Module):
  """scale (x - mean) / sqrt(variance + eps) + bias over the last axis."""

  def __init__(self, size, axis, *, eps):
    self.scale, self.bias = param(jnp.ones(size), axis), param(jnp.zeros(size), axis)
    self.eps = eps

  def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return layer_norm(x, self.scale[...], self.bias[...], self.eps)


class HeadLayerNorm(nnx.Module):
  """Per-head LayerNorm (group norm); scale and optional bias have an entry per channel and head."""

  def __init__(self, heads, size, *, eps, bias, scale=1.0):
    self.scale = param(jnp.full(heads * size, scale), "heads")
    self.bias = param(jnp.zeros(heads * size), "heads") if bias else None
    self.size, self.eps = size, eps

  def __call__(self, o: Float[Array, "B L H dv"]) -> Float[Array, "B L d"]:
    def run(o, scale, bias):
      flat = lambda y: None if y is None else y.reshape(-1)
      y = layer_norm(merge_heads(o), flat(scale), flat(bias), self.eps, self.size)
      return (split_heads(y, o.shape[2]),)

    split = lambda w: None if w is None else w[...].reshape(-1, self.size)
    arguments = (o, split(self.scale), split(self.bias))
    (y,) = locally(run, arguments, (_HEADS, _HEADS[2:], _HEADS[2:]), (_HEADS,))
    return merge_heads(y)


class HeadOutput(nnx.Module):
  """Gated per-head RMSNorm, gate_activation(gate(x)) * norm(o), and the output projection.

  Args:
    gate: False for no gate, True for a full-rank one, or a module that computes its logits.
  """

  def __init__(
    self, width, heads, value_size, gate, *, eps, std, rngs, gate_activation=jax.nn.silu
  ):
    inner = heads * value_size
    self.norm = RMSNorm(value_size, None, eps=eps)
    self.gate_activation = gate_activation
    if gate is True:
      gate = Linear((width, inner), ("embed", "heads"), std=std, rngs=rngs)
    self.gate = gate or None
    self.out = Linear((inner, width), ("heads", "embed"), std=std, rngs=rngs)

  def __call__(self, o, x):
    """Return y `[B L D]` from the operator's output o `[B L H dv]` and the mixer's input x."""
    scale, eps, H = self.norm.scale[...], self.norm.eps, o.shape[2]
    gate = None if self.gate is None else split_heads(self.gate(x), H)

    def norm(o, gate, scale):
      gate = None if gate is None else merge_heads(gate)
      y = head_norm(merge_heads(o), scale, eps, gate=gate, gate_activation=self.gate_activation)
      return (split_heads(y, o.shape[2]),)

    names = (_HEADS, _HEADS, (None,))
    (y,) = locally(norm, (o.astype(x.dtype), gate, scale), names, names[:1])
    return self.out(merge_heads(y))


class ShortConv(nnx.Module):
  """Causal depthwise convolution over a few tokens."""

  def __init__(self, width, channels, axis, *, std, rngs, bias=False):
    self.kernel = param(normal(rngs, (width, channels), std), None, axis)
    self.bias = param(jnp.zeros(channels), axis) if bias else None

  def __call__(
    self,
    x: Float[Array, "B L d"],
    state: Float[Array, "B W d"] | None,
    segment_ids: Int[Array, "B L"] | None,
    epilogue: Epilogue = IDENTITY,
  ) -> tuple[Float[Array, "B L d"], Float[Array, "B W d"]]:
    kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
    options = dict(bias=bias, state=state, segment_ids=segment_ids)
    if state is None and epilogue.size is not None and bias is None:
      return _conv_per_head(x, kernel, segment_ids, epilogue)
    # Channels without heads are sharded by the compiler, which cannot partition a Pallas kernel.
    y, after = short_conv(x, kernel, **options, implementation="plain")
    return head_epilogue(y, epilogue), after

  def init_state(self, B, dtype):
    width, channels = self.kernel.shape
    return jnp.zeros((B, width - 1, channels), dtype)


def _conv_per_head(x, kernel, segment_ids, epilogue):
  """Convolution and epilogue, sharded over batch and heads."""
  split = lambda y: y.reshape(*y.shape[:-1], -1, epilogue.size)
  merge = lambda y: y.reshape(*y.shape[:-2], -1)

  def run(x, kernel, segment_ids):
    out = short_conv(merge(x), merge(kernel), segment_ids=segment_ids, epilogue=epilogue)
    return tuple(split(y) for y in out)

  tokens = ("batch", None, "mixing_heads", None)
  names = (tokens, tokens[1:], ("batch", None))
  out = locally(run, (split(x), split(kernel), segment_ids), names, (tokens, tokens))
  return tuple(merge(y) for y in out)


class QKV(nnx.Module):
  """Projections to q, k and v, each followed by a short convolution (if `conv` > 0) and epilogue.

  Args:
    conv: width of the convolution kernels, 0 for none.
    steps: keys and values per token (DeltaProduct); there is one query per token.
    epilogue: activation and norm of q and k, and those of v.
  """

  def __init__(
    self,
    width,
    key_width,
    value_width,
    conv,
    *,
    std,
    rngs,
    bias=False,
    steps=1,
    epilogue=(IDENTITY, IDENTITY),
  ):
    self.qk_epilogue, self.v_epilogue = epilogue
    k_width, v_width = steps * key_width, steps * value_width
    into = dict(axes=("embed", "heads"), std=std, rngs=rngs, bias=bias)
    make = lambda size: Linear((width, size), **into)
    self.q, self.k, self.v = make(key_width), make(k_width), make(v_width)
    make = lambda size: ShortConv(conv, size, "heads", std=std, rngs=rngs)
    self.q_conv = make(key_width) if conv else None
    self.k_conv = make(k_width) if conv else None
    self.v_conv = make(v_width) if conv else None

  def _branches(self):
    """(name of the convolution state, projection, convolution, epilogue) of q, k and v."""
    return (
      ("q_conv", self.q, self.q_conv, self.qk_epilogue),
      ("k_conv", self.k, self.k_conv, self.qk_epilogue),
      ("v_conv", self.v, self.v_conv, self.v_epilogue),
    )

  def init_state(self, batch, dtype):
    """Convolution states by name; empty without convolutions."""
    convs = ((name, conv) for name, _, conv, _ in self._branches() if conv is not None)
    return {name: conv.init_state(batch, dtype) for name, conv in convs}

  def __call__(self, x, segment_ids, state, extra=()):
    """Return ([q, k, v, *extra projections of x], new convolution states).

    Args:
      state: dictionary with the convolution states; None starts from zeros, and the returned
        states are then to be ignored.
      extra: `Linear`s that are applied to x in the same matmul where that is faster.
    """
    if state is None and self._can_fuse(x, extra):
      return self._fused(x, segment_ids, extra), {}
    out, states = [], {}
    for name, linear, conv, epilogue in self._branches():
      y = linear(x)
      if conv is None:
        y = head_epilogue(y, epilogue)
      else:
        before = None if state is None else state[name]
        y, states[name] = conv(y, before, segment_ids, epilogue)
      out.append(y)
    return out + [linear(x) for linear in extra], states

  def _can_fuse(self, x, extra):
    """Whether to use one matmul for all projections, and one kernel for all convolutions.

    Only a GPU has that kernel (`short_convs`): it reads q, k and v from the joint matmul's output
    without copies. Not if heads or tokens are sharded: concatenating sharded weights would move
    them between devices.
    """
    if self.q_conv is None or any(linear.bias is not None for linear in (self.q, *extra)):
      return False
    kernels, epilogues = self._conv_kernels()
    return not splits("mixing_heads") and has_short_convs(x.dtype, kernels, epilogues)

  def _conv_kernels(self):
    branches = self._branches()
    return [conv.kernel[...] for _, _, conv, _ in branches], [e for *_, e in branches]

  def _fused(self, x, segment_ids, extra):
    """[q, k, v, *extra projections of x] by one matmul and one convolution kernel."""
    weights = [linear.kernel[...] for linear in (self.q, self.k, self.v, *extra)]
    # Pad the columns to a multiple of 32 bytes (16 bfloat16), the unit of memory transactions.
    padding = -sum(weight.shape[1] for weight in weights) % 16
    weights.append(jnp.zeros((x.shape[2], padding), x.dtype))
    kernels, epilogues = self._conv_kernels()

    def run(y, segment_ids, *kernels):
      return tuple(short_convs(y, kernels, epilogues, segment_ids=segment_ids))

    tokens = ("batch", None, None)
    names = (tokens, tokens[:2], *[(None, None)] * len(kernels))
    *qkv, rest = locally(run, (matmuls(x, weights), segment_ids, *kernels), names, [tokens] * 4)
    ends = list(itertools.accumulate(linear.kernel.shape[1] for linear in extra))
    return qkv + jnp.split(rest, ends, axis=2)[:-1]


def head_epilogue(y, epilogue):
  """epilogue(y) of y `[B L d]`, sharded over tokens and heads."""
  y = epilogue.activate(y)
  return y if epilogue.norm is None else per_head(epilogue.normalize, y, epilogue.size)


def per_head(norm, x, size):
  """norm(x) of x `[B L H*size]`, sharded over tokens and heads."""

  def run(x):
    return (split_heads(norm(merge_heads(x)), x.shape[2]),)

  (y,) = locally(run, (split_heads(x, x.shape[2] // size),), (_HEADS,), (_HEADS,))
  return merge_heads(y)


def rope(x, position, base):
  """Rotary position embedding of x `[B L H d]`, sharded over tokens and heads."""
  names = (_HEADS, _HEADS[:2])
  (y,) = locally(lambda *args: (ops.rope(*args, base),), (x, position), names, names[:1])
  return y
