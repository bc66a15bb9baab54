"""Short causal convolution, one filter per channel, and what follows it."""

from collections.abc import Sequence
from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import check_implementation
from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.dtypes import accum_dtype, upcast
from deltanet_jax.ops.epilogue import IDENTITY, Epilogue
from deltanet_jax.ops.segments import number_segments, segment_positions
from pallas_kernels.common.autodiff import custom_backward
from pallas_kernels.common.tiling import LANES

Implementation = Literal["plain", "pallas_tpu", "pallas_gpu"]
_FASTEST = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # by platform; elsewhere plain
_MAX_WIDTH = 16  # tokens that a kernel's block sees of the one before it


def short_conv(
  x: Float[Array, "B L d"],
  kernel: Float[Array, "W d"],
  *,
  bias: Float[Array, " d"] | None = None,
  state: Float[Array, "B W-1 d"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  epilogue: Epilogue = IDENTITY,
  implementation: Implementation | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B L d"], Float[Array, "B W-1 d"]]:
  """y_t = epilogue(sum_i kernel_i x_{t-W+1+i} + bias); the last tap meets the current token.

  Args:
    state: the W - 1 inputs before the first token, zeros if None. It belongs to the first
      segment of a row, the returned one to the last.
    segment_ids: tokens of other segments count as zeros.
    epilogue: activation and norm of heads.
    implementation: "plain" are operations of XLA, "pallas_tpu" and "pallas_gpu" one pass over x. A
      named one runs or raises. None takes the fastest that the platform has for these inputs.
    interpret: runs the Pallas kernel on the CPU.

  Returns:
    y in x's dtype, and the last W - 1 inputs.
  """
  B, L, d = x.shape
  W = kernel.shape[0]
  if state is not None and state.shape != (B, W - 1, d):
    raise ValueError(f"state has shape {state.shape}, expected [B, W-1, d] = {[B, W - 1, d]}.")
  segments = None if segment_ids is None else number_segments(segment_ids)
  if interpret and implementation in (None, "plain"):
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} is none."
    )
  implementation = _choose(implementation, x, kernel, state, epilogue)
  by_kernel = implementation != "plain"
  if by_kernel:
    y = _kernel(implementation, x, kernel, bias, segment_ids, epilogue, interpret)
  if state is None:
    y, last = y if by_kernel else _conv(x, kernel, bias, segments), min(L, W - 1)
    after = jnp.pad(x[:, L - last :], ((0, 0), (W - 1 - last, 0), (0, 0)))
    after_segments = (
      None if segments is None else jnp.pad(segments[:, L - last :], ((0, 0), (W - 1 - last, 0)))
    )
  else:
    # The tokens in `state` are of segment 0, the first one of the row.
    x = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    segments = None if segments is None else jnp.pad(segments, ((0, 0), (W - 1, 0)))
    y = _filter(x, kernel, bias, segments)[:, W - 1 :].astype(x.dtype)
    after, after_segments = x[:, L:], None if segments is None else segments[:, L:]
  if segments is not None:
    after = jnp.where((after_segments == segments[:, -1:])[..., None], after, 0)
  return y if by_kernel else epilogue(y), after


def short_convs(
  x: Float[Array, "B L n"],
  kernels: Sequence[Float[Array, "W _"]],
  epilogues: Sequence[Epilogue],
  *,
  segment_ids: Int[Array, "B L"] | None = None,
  interpret: bool = False,
) -> list[Float[Array, "B L _"]]:
  """`short_conv` of parts of x's channels, one after the other, each with its kernel and epilogue.

  A kernel for NVIDIA GPUs, of inputs that `has_short_convs` names: x, which one product made, is
  read as it lies, and its gradient is written as one array.

  Args:
    x: the parts' channels, and then any others.
    interpret: runs the kernel on the CPU.

  Returns:
    A result for each part, and x's other channels as they are.
  """
  for kernel, epilogue in zip(kernels, epilogues, strict=True):
    if reason := _unsupported_reason("pallas_gpu", x.dtype, kernel, None, epilogue):
      raise ValueError(f"{reason}; use short_conv.")
  parts = [(epilogue, kernel.shape[1]) for kernel, epilogue in zip(kernels, epilogues)]
  return _gpu_kernel(x, jnp.concatenate(kernels, axis=1), None, segment_ids, parts, interpret)


def has_short_convs(dtype, kernels, epilogues) -> bool:
  """Whether the platform has `short_convs`, for these inputs."""
  refused = (
    _unsupported_reason("pallas_gpu", dtype, k, None, f) for k, f in zip(kernels, epilogues)
  )
  return target_platform() == "gpu" and not any(refused)


def _unsupported_reason(implementation, dtype, kernel, state, epilogue):
  """Why that kernel does not take these inputs, in one sentence; None if it does."""
  size, D = epilogue.size or LANES, kernel.shape[1]
  if state is not None:
    return "a kernel begins with nothing before the first token, state must be None"
  if dtype not in (jnp.bfloat16, jnp.float32):
    return f"a kernel takes bfloat16 or float32, got {dtype}"
  if kernel.shape[0] > _MAX_WIDTH:
    return f"a kernel takes up to {_MAX_WIDTH} taps, got {kernel.shape[0]}"
  if implementation == "pallas_tpu" and (D % LANES or (size % LANES and LANES % size)):
    return f"a kernel takes whole groups of {LANES} channels, got {D} in heads of {size}"
  if implementation == "pallas_gpu" and (D % size or size & (size - 1) or size > 512):
    return f"a kernel takes heads of a power of two up to 512 channels, got {D} in heads of {size}"
  return None


def _choose(implementation, x, kernel, state, epilogue):
  """The implementation of this name, which takes these inputs; of no name, the fastest."""
  named = implementation is not None
  if named:
    check_implementation(implementation, get_args(Implementation))
  else:
    implementation = _FASTEST.get(target_platform(), "plain")
  reason = None
  if implementation != "plain":
    reason = _unsupported_reason(implementation, x.dtype, kernel, state, epilogue)
  if reason and named:
    raise ValueError(f'{reason}; use implementation="plain".')
  return "plain" if reason else implementation


def _kernel(implementation, x, kernel, bias, segment_ids, epilogue, interpret):
  if implementation == "pallas_gpu":
    parts = [(epilogue, x.shape[2])]
    return _gpu_kernel(x, kernel, bias, segment_ids, parts, interpret)[0]
  # Imported when it is called: it is heavy.
  from pallas_kernels.short_conv import vjp

  how = dict(epilogue=epilogue.in_kernel, size=epilogue.size or LANES, interpret=interpret)
  return vjp.short_conv_tpu(x, kernel, bias, _ages(x, segment_ids), **how)


def _gpu_kernel(x, kernel, bias, segment_ids, parts, interpret):
  from pallas_kernels.short_conv import vjp

  parts = tuple(
    (epilogue.in_kernel, epilogue.size or LANES, channels) for epilogue, channels in parts
  )
  ages = _ages(x, segment_ids)
  return list(vjp.short_convs_gpu(x, kernel, bias, ages, parts, interpret=interpret))


def _ages(x, segment_ids):
  """Tokens before each one in its segment, None for one segment."""
  if segment_ids is None:
    return None
  return segment_positions(jnp.zeros(x.shape[0], jnp.int32), x.shape[1], segment_ids)


def _shift(x, s):
  """x_{t-s}, zeros where that is outside."""
  return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (s, -s, 0), (0, 0, 0)])


def _same(segments, s, x):
  """x_t where token t - s is of t's segment, else 0."""
  if segments is None or s == 0:
    return x
  before = lax.pad(segments, jnp.full((), -1, segments.dtype), [(0, 0, 0), (s, -s, 0)])
  return jnp.where((before == segments)[..., None], x, 0)


def _filter(x, kernel, bias, segments):
  """sum_s kernel_{W-1-s} x_{t-s} + bias, float32 at least."""
  taps = kernel.astype(accum_dtype(x.dtype))[::-1, None, None]
  y = sum(upcast(_same(segments, s, _shift(x, s))) * tap for s, tap in enumerate(taps))
  return y if bias is None else y + bias.astype(y.dtype)[None, None]


def _conv_backward(args, d):
  # By hand: autodiff writes the gradient of every tap, in x's dtype, and adds them up after that.
  x, kernel, bias, segments = args
  taps = kernel.astype(accum_dtype(x.dtype))[::-1, None, None]
  dx = sum(upcast(_shift(_same(segments, s, d), -s)) * tap for s, tap in enumerate(taps))
  total = lambda y: y.sum(axis=(0, 1))
  dkernel = [total(upcast(d) * upcast(_same(segments, s, _shift(x, s)))) for s in range(len(taps))]
  dbias = None if bias is None else total(upcast(d)).astype(bias.dtype)
  return dx.astype(x.dtype), jnp.stack(dkernel[::-1]).astype(kernel.dtype), dbias, None


@custom_backward(_conv_backward)
def _conv(x, kernel, bias, segments):
  return _filter(x, kernel, bias, segments).astype(x.dtype)
