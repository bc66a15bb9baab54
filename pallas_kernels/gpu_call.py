"""How a kernel of ours for NVIDIA GPUs is called."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


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
