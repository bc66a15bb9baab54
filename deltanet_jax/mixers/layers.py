"""Modules that mixers and models are made of; a weight knows its axes and whether it decays."""

import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from deltanet_jax import ops
from deltanet_jax.ops import head_norm, rms_norm, short_conv, short_convs
from deltanet_jax.ops.epilogue import IDENTITY, Epilogue
from deltanet_jax.ops.matmul import matmul, matmuls
from deltanet_jax.ops.short_conv import has_short_convs
from deltanet_jax.sharding import locally, splits

# Of a norm of heads: none is cut in two, and the tokens stay where they are.
_HEADS = ("batch", "length", "heads", None)


def param(value: Array, *axes: str | None, decays: bool | None = None) -> nnx.Param:
  """A float32 weight with one logical axis name per dimension (None: never sharded).

  Args:
    decays: whether weight decay is for it; None: for matrices, not for norms and biases.
  """
  assert value.ndim == len(axes), (value.shape, axes)
  decays = value.ndim > 1 if decays is None else decays
  return nnx.Param(value.astype(jnp.float32), axes=axes, decays=decays)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> Array:
  return std * jax.random.normal(rngs.params(), shape, jnp.float32)


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


class RMSNorm(nnx.Module):
  """scale x / sqrt(mean(x^2) + eps) over the last axis."""

  def __init__(self, size, axis, *, eps):
    self.scale = param(jnp.ones(size), axis)
    self.eps = eps

  def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return rms_norm(x, self.scale[...], self.eps)


class ShortConv(nnx.Module):
  """Causal convolution of a few tokens, one filter per channel."""

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
      return _conv_of_heads(x, kernel, segment_ids, epilogue)
    # Channels that are no heads are split by the compiler, which cannot split a kernel.
    y, after = short_conv(x, kernel, **options, implementation="plain")
    return head_epilogue(y, epilogue), after

  def init_state(self, B, dtype):
    width, channels = self.kernel.shape
    return jnp.zeros((B, width - 1, channels), dtype)


def _conv_of_heads(x, kernel, segment_ids, epilogue):
  """A convolution and what follows it, by each device for its own rows and heads."""
  heads = lambda y: y.reshape(*y.shape[:-1], -1, epilogue.size)
  whole = lambda y: y.reshape(*y.shape[:-2], -1)

  def run(x, kernel, segment_ids):
    out = short_conv(whole(x), whole(kernel), segment_ids=segment_ids, epilogue=epilogue)
    return tuple(heads(y) for y in out)

  tokens = ("batch", None, "mixing_heads", None)
  names = (tokens, tokens[1:], ("batch", None))
  out = locally(run, (heads(x), heads(kernel), segment_ids), names, (tokens, tokens))
  return tuple(whole(y) for y in out)


class LowRank(nnx.Module):
  """act(x A) B (+ b), where A has `rank` columns and at first the scale `down_std`, or `std`."""

  def __init__(self, width, rank, size, *, std, rngs, bias=False, act=None, down_std=None):
    down_std = std if down_std is None else down_std
    self.down = Linear((width, rank), ("embed", None), std=down_std, rngs=rngs)
    self.up = Linear((rank, size), (None, "heads"), std=std, rngs=rngs, bias=bias)
    self.act = act

  def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L d"]:
    return self.of_down(self.down(x))

  def of_down(self, y: Float[Array, "B L r"]) -> Float[Array, "B L d"]:
    """The same from y = x A."""
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
  """gelu(x W_up + b) W_down + b', the GELU by its tanh."""

  def __init__(self, width, inner, *, std, rngs):
    options = dict(std=std, rngs=rngs, bias=True)
    self.up = Linear((width, inner), ("embed", "mlp"), **options)
    self.down = Linear((inner, width), ("mlp", "embed"), **options)

  def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    return self.down(jax.nn.gelu(self.up(x), approximate=True))


def dt_bias(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
  """b with softplus(b) log-uniform between 0.001 and 0.1."""
  u = jax.random.uniform(rngs.params(), shape, jnp.float32)
  dt = jnp.exp(u * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3))
  return dt + jnp.log(-jnp.expm1(-dt))


def split_heads(x: Float[Array, "B L d"], heads: int) -> Float[Array, "B L H dh"]:
  return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def merge_heads(x: Float[Array, "B L H dh"]) -> Float[Array, "B L d"]:
  return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


class QKV(nnx.Module):
  """Projections to q, k and v, each followed by a short convolution if `conv` > 0.

  A token has one query and `steps` keys and values. `epilogue` is what follows: of q and k, of v.
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
    self.key_finish, self.value_finish = epilogue
    k_width, v_width = steps * key_width, steps * value_width
    into = dict(axes=("embed", "heads"), std=std, rngs=rngs, bias=bias)
    make = lambda size: Linear((width, size), **into)
    self.q, self.k, self.v = make(key_width), make(k_width), make(v_width)
    make = lambda size: ShortConv(conv, size, "heads", std=std, rngs=rngs)
    self.q_conv = make(key_width) if conv else None
    self.k_conv = make(k_width) if conv else None
    self.v_conv = make(v_width) if conv else None

  def init_state(self, batch, dtype):
    """The convolutions' states by name, none without convolutions."""
    if self.q_conv is None:
      return {}
    convs = dict(q_conv=self.q_conv, k_conv=self.k_conv, v_conv=self.v_conv)
    return {name: conv.init_state(batch, dtype) for name, conv in convs.items()}

  def __call__(self, x, segment_ids, state, beside=()):
    """([q, k, v, *results of the `Linear`s beside], convolution states, none if `state` is)."""
    if state is None and self._are_one_product(x, beside):
      return self._of_one_product(x, segment_ids, beside), {}
    out, states = [], {}
    for name, proj in (("q", self.q), ("k", self.k), ("v", self.v)):
      y, conv = proj(x), getattr(self, f"{name}_conv")
      epilogue = self.value_finish if name == "v" else self.key_finish
      if conv is None:
        y = head_epilogue(y, epilogue)
      else:
        before = None if state is None else state[f"{name}_conv"]
        y, states[f"{name}_conv"] = conv(y, before, segment_ids, epilogue)
      out.append(y)
    return out + [linear(x) for linear in beside], states

  def _convs(self):
    """Their weights, and what follows each."""
    kernels = [conv.kernel[...] for conv in (self.q_conv, self.k_conv, self.v_conv)]
    return kernels, [self.key_finish, self.key_finish, self.value_finish]

  def _are_one_product(self, x, beside):
    """Whether x is read once for all of them, by a product with their weights side by side.

    Where a kernel takes the convolutions from that product as it lies, which a GPU has: slices of
    it would be copies. Not where heads or tokens are split over devices: side by side, the parts of
    weights that a device holds are no part of the whole, and would be sent around.
    """
    if self.q_conv is None or any(y.bias is not None for y in (self.q, *beside)):
      return False
    return not splits("mixing_heads") and has_short_convs(x.dtype, *self._convs())

  def _of_one_product(self, x, segment_ids, beside):
    weights = [linear.kernel[...] for linear in (self.q, self.k, self.v, *beside)]
    # Rows of whole 32 bytes, as memory is read.
    fill = -sum(weight.shape[1] for weight in weights) % 16
    weights.append(jnp.zeros((x.shape[2], fill), x.dtype))
    kernels, epilogues = self._convs()

    def run(y, segment_ids, *kernels):
      return tuple(short_convs(y, kernels, epilogues, segment_ids=segment_ids))

    tokens = ("batch", None, None)
    names = (tokens, tokens[:2], *[(None, None)] * len(kernels))
    *qkv, others = locally(run, (matmuls(x, weights), segment_ids, *kernels), names, [tokens] * 4)
    ends = list(itertools.accumulate(linear.kernel.shape[1] for linear in beside))
    return qkv + jnp.split(others, ends, axis=2)[:-1]


class HeadOutput(nnx.Module):
  """RMSNorm per head, times silu of a gate if there is one, and the output projection.

  The gate is of full rank, or the module given as `gate` instead of True.
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
    """o `[B L H dv]` of the recurrence and the mixer's input x give y `[B L D]`."""
    scale, eps, H = self.norm.scale[...], self.norm.eps, o.shape[2]
    gate = None if self.gate is None else split_heads(self.gate(x), H)

    def norm(o, gate, scale):
      gate = None if gate is None else merge_heads(gate)
      y = head_norm(merge_heads(o), scale, eps, gate=gate, gate_activation=self.gate_activation)
      return (split_heads(y, o.shape[2]),)

    names = (_HEADS, _HEADS, (None,))
    (y,) = locally(norm, (o.astype(x.dtype), gate, scale), names, names[:1])
    return self.out(merge_heads(y))


def head_epilogue(y, epilogue):
  """epilogue(y) of y `[B L d]`, by each device for its own heads."""
  y = epilogue.activate(y)
  return y if epilogue.norm is None else per_head(epilogue.normalize, y, epilogue.size)


def per_head(norm, x, size):
  """norm(x) of x `[B L H·size]`, by each device for its own heads."""

  def run(x):
    return (split_heads(norm(merge_heads(x)), x.shape[2]),)

  (y,) = locally(run, (split_heads(x, x.shape[2] // size),), (_HEADS,), (_HEADS,))
  return merge_heads(y)


def rope(x, position, base):
  """Rotary positions of x `[B L H d]`, by each device for its own tokens and heads."""
  tokens = ("batch", "length")
  names = ((*tokens, "heads", None), tokens)
  (y,) = locally(lambda *args: (ops.rope(*args, base),), (x, position), names, names[:1])
  return y
