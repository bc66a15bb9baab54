"""Launch of the delta-rule and linear-attention kernels on NVIDIA GPUs, with refs by name."""

import functools

import jax

from pallas_kernels.common import gpu


def launch_kernel(
  kernel, body, inputs, outputs, *, grid, tile, interpret, delta_rule=True, aliases=None
):
  """Run body(**refs); the ref of array `x` is the keyword argument `x_ref`.

  Args:
    kernel: name of the kernel without the operator.
    inputs: name -> array, in order; those that are None are left out, the body's default applies.
    outputs: name -> anything with its shape and dtype.
    delta_rule: False for linear attention.
    aliases: input name -> name of the output that reuses its buffer.

  Returns:
    name -> array of the outputs.
  """
  inputs = {name: x for name, x in inputs.items() if x is not None}
  names = [f"{name}_ref" for name in (*inputs, *outputs)]
  index = lambda named, name: list(named).index(name)
  found = gpu.launch(
    lambda *refs: body(**dict(zip(names, refs, strict=True))),
    f"{'delta_rule' if delta_rule else 'linear_attention'}_{kernel}",
    inputs.values(),
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()],
    grid=grid,
    warps=tile.warps,
    stages=tile.stages,
    interpret=interpret,
    aliases={index(inputs, x): index(outputs, y) for x, y in (aliases or {}).items()},
  )
  return dict(zip(outputs, found))


def launch_over_chunks(kernel, body, inputs, outputs, *, v, chunk, tile, interpret, **options):
  """Run a kernel that carries a state: one program per (value block, value head, sequence).

  Args:
    body: also takes group (value heads per key head), chunk, block_k, block_v and `options`.
    inputs, outputs: as in `launch_kernel`; k and, for the delta rule, X are among the inputs.
    v: the values [B L Hv dv], which need not be an input.
  """
  (_, _, H, dk), (B, _, Hv, dv) = inputs["k"].shape, v.shape
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    body, group=Hv // H, chunk=chunk, block_k=min(tile.block_k, dk), block_v=block_v, **options
  )
  return launch_kernel(
    kernel,
    body,
    inputs,
    outputs,
    grid=(dv // block_v, Hv, B),
    tile=tile,
    interpret=interpret,
    delta_rule=inputs["X"] is not None,
  )
