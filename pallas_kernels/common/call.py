"""`pl.pallas_call` that also works inside the user's `jax.shard_map`, compiled and interpreted."""

import jax
from jax._src import config  # no public switch: see `_lower`
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_kernels.common.varying import vary_together, varying_axes


def pallas_call(kernel, *, out_shape, interpret: bool, **options):
  """Return `pl.pallas_call(kernel, ...)`, whose results vary over the mesh axes of its arguments.

  Outside a `shard_map` with `check_vma=True` it is `pl.pallas_call` itself.
  """

  def run(*args):
    args = vary_together(*args)
    if not varying_axes(args):
      return pl.pallas_call(kernel, out_shape=out_shape, interpret=interpret, **options)(*args)
    like = jax.typeof(args[0])
    typed = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=like.manual_axis_type),
      out_shape,
    )
    call = pl.pallas_call(kernel, out_shape=typed, interpret=interpret, **options)
    if not interpret:
      return call(*args)
    leaves, tree = jax.tree.flatten(typed)
    types = tuple(_with_shape(like, x.shape, x.dtype) for x in leaves)
    plain = pl.pallas_call(kernel, out_shape=out_shape, interpret=True, **options)
    flat = lambda *args: jax.tree.leaves(plain(*args))
    return jax.tree.unflatten(tree, _interpreted.bind(*args, run=flat, types=types))

  return run


def _with_shape(aval, shape, dtype):
  """Return the type of an array of another shape that varies over the same mesh axes."""
  return aval.update(shape, dtype, sharding=aval.sharding.update(spec=(None,) * len(shape)))


# Interpret mode (jax 0.10.2) traces a kernel's loops at lowering and mixes block indices, which do
# not vary, with arrays that do. This primitive gives the results their type, and lowers the
# interpreter without these types.
_interpreted = Primitive("interpreted_kernel")
_interpreted.multiple_results = True


@_interpreted.def_abstract_eval
def _abstract(*_, types, **__):
  return list(types)


def _lower(ctx, *operands, run, types):
  untyped = lambda x: jax.core.ShapedArray(x.shape, x.dtype)
  ctx = ctx.replace(avals_in=[*map(untyped, ctx.avals_in)], avals_out=[*map(untyped, types)])
  with config._check_vma(False):
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _batch(operands, axes, *, run, types):
  size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
  batched = jax.vmap(run, in_axes=tuple(axes), axis_size=size)
  types = tuple(_with_shape(x, (size, *x.shape), x.dtype) for x in types)
  outs = _interpreted.bind(*operands, run=lambda *args: list(batched(*args)), types=types)
  return outs, [0] * len(outs)


mlir.register_lowering(_interpreted, _lower)
batching.primitive_batchers[_interpreted] = _batch
