"""Operators inside the user's own JAX code: eager calls, `shard_map`, explicit sharding.

`composable` decorates the public operators. It
- compiles an operator once per shapes, dtypes and options: a second eager call, or `jax.grad` of
  one, compiles nothing. Inside a user's `jax.jit` the operator is inlined;
- gives all arrays the same varying mesh axes, which `jax.shard_map(check_vma=True)` demands of the
  carry of a loop and of a custom derivative;
- on a mesh with explicit axes (`AxisType.Explicit`) leaves the inside of the operator to the
  partitioner, and shards the results as the annotations of the operator name their axes.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.common.varying import vary_together


def composable(*, static: Sequence[str] = ()) -> Callable[[Callable], Callable]:
  """Decorate an operator so that it composes with the user's code; see the module docstring.

  Args:
    static: Names of the arguments that are not arrays. They must be hashable.
  """

  def decorate(f):
    signature = inspect.signature(f)
    results = _result_axes(signature.return_annotation)
    axes = {name: _array_axes(p.annotation) for name, p in signature.parameters.items()}

    def call(**arguments):
      options = {name: arguments.pop(name) for name in static}
      run = lambda arrays: f(**vary_together(arrays)[0], **options)
      mesh = jax.sharding.get_abstract_mesh()
      if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return run(arguments)
      out = _result_specs(run, results, axes, arguments)
      return jax.sharding.auto_axes(run, out_sharding=out)(arguments)

    call.__name__ = call.__qualname__ = f.__name__
    compiled = jax.jit(call, static_argnames=static, inline=True)

    @functools.wraps(f)
    def wrapper(*args, **kwargs):
      bound = signature.bind(*args, **kwargs)
      bound.apply_defaults()
      arguments = bound.arguments
      for name in static:
        arguments[name] = _hashable(arguments[name])
      return compiled(**arguments)

    return wrapper

  return decorate


def _hashable(x):
  """Lists as tuples, arrays of one number as that number."""
  if isinstance(x, list):
    return tuple(x)
  return x.item() if hasattr(x, "item") else x


def _array_axes(annotation) -> list[tuple[str, ...]]:
  """The axis names of each jaxtyping alternative of an annotation."""
  alternatives = typing.get_args(annotation) or (annotation,)
  return [tuple(a.dim_str.split()) for a in alternatives if hasattr(a, "dim_str")]


def _result_axes(annotation):
  if typing.get_origin(annotation) is tuple:
    return [_array_axes(a) for a in typing.get_args(annotation)]
  return [_array_axes(annotation)]


def _spec(x, mesh_axes):
  """The entries of x's PartitionSpec on explicit mesh axes, one for each axis."""
  spec = jax.typeof(x).sharding.spec
  return tuple(spec) + (None,) * (x.ndim - len(spec))


def _result_specs(run, results, axes, arguments):
  """A PartitionSpec for each result: each axis is sharded as the arguments shard that name."""
  sharded, by_shape = {}, {}
  for name, x in arguments.items():
    for names in axes[name]:
      if hasattr(x, "ndim"):
        spec = _spec(x, None)
        by_shape.setdefault(names, spec)
        if len(names) == x.ndim:
          for axis, entry in zip(names, spec):
            sharded.setdefault(axis, entry)

  def of(alternatives, leaf_count):
    del leaf_count
    names = alternatives[0] if alternatives else ()
    if names in by_shape:
      return PartitionSpec(*by_shape[names])
    used, entries = set(), []
    for axis in names:
      entry = sharded.get(axis)
      members = entry if isinstance(entry, tuple) else (entry,)
      entries.append(None if used & set(members) - {None} else entry)
      used |= set(members)
    return PartitionSpec(*entries)

  specs = tuple(of(result, None) for result in results)
  return specs if len(specs) > 1 else specs[0]
