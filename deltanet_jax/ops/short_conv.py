"""Short causal depthwise convolution with a fused epilogue."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator, target_platform
from deltanet_jax.ops.dtypes import accum_dtype, upcast
from deltanet_jax.ops.epilogue import IDENTITY, Epilogue
from deltanet_jax.ops.segments import number_segments, segment_positions
from pallas_kernels.common.autodiff import custom_backward
from pallas_kernels.common.tiling import LANES

_MAX_WIDTH = 16  # tokens that a kernel's block sees of the previous block


def short_conv(
  x: Float[Array, "B L d"],
  kernel: Float[Array, "W d"],
  *,
  bias: Float[Array, " d"] | None = None,
  state: Float[Array, "B W-1 d"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  epilogue: Epilogue = IDENTITY,
  implementation: str | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B L d"], Float[Array, "B W-1 d"]]:
  """Convolve each channel causally with its own filter of W taps, then apply the epilogue.

  y_t = epilogue(sum_i kernel_i x_{t-W+1+i} + bias); the last tap multiplies the current token.

  Args:
    x: Inputs.
    kernel: Filters.
    bias: Added before the epilogue.
    state: The W - 1 inputs before the first token, zeros if None. It belongs to the first segment
      of a sequence, the returned state to the last.
    segment_ids: Segments of packed sequences; tokens of other segments count as zeros.
    epilogue: Activation and per-head norm.
    implementation: "plain" (XLA operations), "pallas_tpu" or "pallas_gpu" (fused, one pass over x).
      A named implementation runs or raises. None selects the platform's fastest for these inputs.
    interpret: Run a Pallas kernel in interpret mode on the CPU.

  Returns:
    y in x's dtype, and the last W - 1 inputs.
  """
  B, _, d = x.shape
  W = kernel.shape[0]
  if state is not None and state.shape != (B, W - 1, d):
    raise ValueError(f"state has shape {state.shape}, expected [B, W-1, d] = {[B, W - 1, d]}.")
  inputs = (x.dtype, kernel, state, epilogue)
  entry = SHORT_CONV.resolve(implementation, *inputs, interpret=interpret)
  y = entry.run(x, kernel, bias, state, segment_ids, epilogue, interpret)
  return y, _last_inputs(x, state, segment_ids, W)


def _last_inputs(x, state, segment_ids, W):
  """The last W - 1 inputs that belong to the last segment, zeros for the others."""
  L, segments = x.shape[1], number_segments(segment_ids)
  if state is None:
    last = min(L, W - 1)
    before = W - 1 - last
    after = jnp.pad(x[:, L - last :], ((0, 0), (before, 0), (0, 0)))
    if segments is not None:
      after_segments = jnp.pad(segments[:, L - last :], ((0, 0), (before, 0)))
  else:
    x, padded_segments = _prepend(x, state, segments)
    after = x[:, L:]
    if segments is not None:
      after_segments = padded_segments[:, L:]
  if segments is None:
    return after
  return jnp.where((after_segments == segments[:, -1:])[..., None], after, 0)


def _prepend(x, state, segments):
  """Prepend the inputs in `state`, which belong to segment 0, the first of a sequence."""
  x = jnp.concatenate([state.astype(x.dtype), x], axis=1)
  return x, None if segments is None else jnp.pad(segments, ((0, 0), (state.shape[1], 0)))


def short_convs(
  x: Float[Array, "B L n"],
  kernels: Sequence[Float[Array, "W _"]],
  epilogues: Sequence[Epilogue],
  *,
  segment_ids: Int[Array, "B L"] | None = None,
  interpret: bool = False,
) -> list[Float[Array, "B L _"]]:
  """Apply `short_conv` to consecutive parts of x's channels, each with its kernel and epilogue.

  A fused kernel for NVIDIA GPUs, for inputs that pass `has_short_convs`. It reads x, the output of
  one fused matmul, without slicing it, and writes its gradient as one array.

  Args:
    x: The channels of all parts, followed by any others.
    kernels: Filters of each part.
    epilogues: Epilogue of each part.
    segment_ids: Segments of packed sequences.
    interpret: Run the kernel in interpret mode on the CPU.

  Returns:
    The result of each part, and x's other channels unchanged.
  """
  for kernel, epilogue in zip(kernels, epilogues, strict=True):
    if reason := _pallas_gpu_reason(x.dtype, kernel, None, epilogue):
      raise ValueError(f"short_convs does not support these inputs: {reason}; use short_conv.")
  parts = [(epilogue, kernel.shape[1]) for kernel, epilogue in zip(kernels, epilogues)]
  return _gpu_kernel(x, jnp.concatenate(kernels, axis=1), None, segment_ids, parts, interpret)


def has_short_convs(dtype, kernels, epilogues) -> bool:
  """Return whether the target platform supports `short_convs` for these inputs."""
  reasons = (_pallas_gpu_reason(dtype, k, None, f) for k, f in zip(kernels, epilogues))
  return target_platform() == "gpu" and not any(reasons)


def _kernel_reason(dtype, kernel, state):
  if state is not None:
    return "a kernel starts without inputs before the first token, state must be None"
  if dtype not in (jnp.bfloat16, jnp.float32):
    return f"a kernel takes bfloat16 or float32, got {dtype}"
  if kernel.shape[0] > _MAX_WIDTH:
    return f"a kernel takes up to {_MAX_WIDTH} taps, got {kernel.shape[0]}"
  return None


def _pallas_tpu_reason(dtype, kernel, state, epilogue):
  size, D = epilogue.size or LANES, kernel.shape[1]
  if reason := _kernel_reason(dtype, kernel, state):
    return reason
  if D % LANES or (size % LANES and LANES % size):
    return f"a kernel takes full groups of {LANES} channels, got {D} in heads of {size}"
  return None


def _pallas_gpu_reason(dtype, kernel, state, epilogue):
  size, D = epilogue.size or LANES, kernel.shape[1]
  if reason := _kernel_reason(dtype, kernel, state):
    return reason
  if D % size or size & (size - 1) or size > 512:
    return f"a kernel takes heads of a power of two up to 512 channels, got {D} in heads of {size}"
  return None


def _pallas_tpu(x, kernel, bias, state, segment_ids, epilogue, interpret):
  from pallas_kernels.short_conv.vjp import short_conv_tpu  # slow to import

  options = dict(epilogue=epilogue.in_kernel, size=epilogue.size or LANES, interpret=interpret)
  return short_conv_tpu(x, kernel, bias, _positions(x, segment_ids), **options)


def _pallas_gpu(x, kernel, bias, state, segment_ids, epilogue, interpret):
  return _gpu_kernel(x, kernel, bias, segment_ids, [(epilogue, x.shape[2])], interpret)[0]


def _gpu_kernel(x, kernel, bias, segment_ids, parts, interpret):
  from pallas_kernels.short_conv.vjp import short_convs_gpu  # slow to import

  parts = tuple(
    (epilogue.in_kernel, epilogue.size or LANES, channels) for epilogue, channels in parts
  )
  positions = _positions(x, segment_ids)
  return list(short_convs_gpu(x, kernel, bias, positions, parts, interpret=interpret))


def _positions(x, segment_ids):
  """Position of each token in its segment, None without segments."""
  if segment_ids is None:
    return None
  return segment_positions(jnp.zeros(x.shape[0], jnp.int32), x.shape[1], segment_ids)


def _plain(x, kernel, bias, state, segment_ids, epilogue, interpret):
  del interpret
  segments = number_segments(segment_ids)
  if state is None:
    return epilogue(_conv(x, kernel, bias, segments))
  x, segments = _prepend(x, state, segments)
  return epilogue(_filter(x, kernel, bias, segments)[:, state.shape[1] :].astype(x.dtype))


def _shift(x, s):
  """x_{t-s}, zeros outside the sequence."""
  return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (s, -s, 0), (0, 0, 0)])


def _mask_segments(segments, s, x):
  """x_t where token t - s is in t's segment, else 0."""
  if segments is None or s == 0:
    return x
  before = lax.pad(segments, jnp.full((), -1, segments.dtype), [(0, 0, 0), (s, -s, 0)])
  return jnp.where((before == segments)[..., None], x, 0)


def _filter(x, kernel, bias, segments):
  """sum_s kernel_{W-1-s} x_{t-s} + bias, at least float32."""
  taps = kernel.astype(accum_dtype(x.dtype))[::-1, None, None]
  y = sum(upcast(_mask_segments(segments, s, _shift(x, s))) * tap for s, tap in enumerate(taps))
  return y if bias is None else y + bias.astype(y.dtype)[None, None]


def _conv_backward(args, d):
  # Custom VJP: autodiff materializes the gradient of every tap in x's dtype before it sums them.
  x, kernel, bias, segments = args
  taps = kernel.astype(accum_dtype(x.dtype))[::-1, None, None]
  dx = sum(upcast(_shift(_mask_segments(segments, s, d), -s)) * tap for s, tap in enumerate(taps))
  total = lambda y: y.sum(axis=(0, 1))
  dkernel = [
    total(upcast(d) * upcast(_mask_segments(segments, s, _shift(x, s)))) for s in range(len(taps))
  ]
  dbias = None if bias is None else total(upcast(d)).astype(bias.dtype)
  return dx.astype(x.dtype), jnp.stack(dkernel[::-1]).astype(kernel.dtype), dbias, None


@custom_backward(_conv_backward)
def _conv(x, kernel, bias, segments):
  return _filter(x, kernel, bias, segments).astype(x.dtype)


SHORT_CONV = Operator(
  "short_conv",
  {
    "pallas_tpu": Entry(
      run=_pallas_tpu,
      default_on=("tpu",),
      unsupported_reason=_pallas_tpu_reason,
      interpretable=True,
      forward_mode=False,
    ),
    "pallas_gpu": Entry(
      run=_pallas_gpu,
      default_on=("gpu",),
      unsupported_reason=_pallas_gpu_reason,
      interpretable=True,
      forward_mode=False,
    ),
    "plain": Entry(run=_plain, default_on=PLATFORMS),
  },
)
