"""Target GPU at trace time, and the launch of a Pallas kernel on NVIDIA GPUs (Triton lowering)."""

import contextlib

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

# A user context is part of the key of JAX's caches: a trace for one GPU is not reused for another.
_compiling_for = jax.make_user_context(None)


def compiling_for_gpu(device_kind: str) -> contextlib.AbstractContextManager:
  """Use the tiles of the GPU `device_kind` (JAX's name) for kernels traced inside the context.

  For AOT compilation without a device.
  """
  return _compiling_for(device_kind)


def device_kind() -> str | None:
  """Return JAX's name of the target GPU: set by `compiling_for_gpu`, else the GPU present."""
  here = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
  return _compiling_for.value or here


def launch(body, name, args, out_shape, *, grid, warps, stages=1, interpret, aliases=None):
  """Run the kernel `body` with full arrays as refs; args that are None are left out.

  Bodies index the arrays in their own layout, so no transposed copy is made.

  Args:
    stages: software pipelining stages of a loop's loads; 1 does not prefetch.
    aliases: input index -> index of the output that reuses its buffer.
  """
  args = [x for x in args if x is not None]
  full = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    body,
    grid=grid,
    in_specs=[full] * len(args),
    out_specs=[full] * len(out_shape),
    out_shape=out_shape,
    input_output_aliases=aliases or {},
    compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
    interpret=interpret,
    name=name,
  )(*args)
