"""Which GPU kernels are traced for, and how a Pallas kernel for NVIDIA GPUs is launched."""

import contextlib

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

# Part of the key of jax's caches: what was traced for one GPU is not taken for another.
_compiling_for = jax.make_user_context(None)


def compiling_for_gpu(device_kind: str) -> contextlib.AbstractContextManager:
  """Kernels traced inside take the tiles of the GPU that jax calls `device_kind`.

  For compiling ahead of time, where no device says what it is.
  """
  return _compiling_for(device_kind)


def device_kind() -> str | None:
  """As jax calls it; None if there is no GPU and none was named."""
  here = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
  return _compiling_for.value or here


def call(body, name, args, out_shape, *, grid, warps, stages=1, interpret, aliases=None):
  """Runs body on whole arrays, those of args that are not None.

  Bodies address arrays themselves, where they lie, so no copy in another layout is ever made.

  Args:
    stages: of a loop's loads that are in flight at once; 1 loads nothing ahead.
    aliases: number of an argument -> number of the output that takes its place.
  """
  args = [x for x in args if x is not None]
  whole = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    body,
    grid=grid,
    in_specs=[whole] * len(args),
    out_specs=[whole] * len(out_shape),
    out_shape=out_shape,
    input_output_aliases=aliases or {},
    compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
    interpret=interpret,
    name=name,
  )(*args)
