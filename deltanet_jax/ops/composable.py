"""Functions that compose with the user's own JAX code: eager calls, `shard_map`, explicit sharding.

`composable` decorates the public operators and the methods of modules. It
- compiles a function once per shapes, dtypes and options: a second eager call, or `jax.grad` of
  one, compiles nothing. Inside a `jax.jit` of the user the compiler inlines the call;
- gives all arrays the same varying mesh axes, which `jax.shard_map(check_vma=True)` demands of the
  carry of a loop and of a custom derivative;
- on a mesh with explicit axes (`AxisType.Explicit`) leaves the inside of the function to the
  partitioner, and shards the results by the axis names in the function's annotations.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.common.varying import vary_together


def composable(
  *,
  static: Sequence[str] = (),
  like: Mapping[int, str] | None = None,
  also: Callable = lambda specs: specs,
) -> Callable[[Callable], Callable]:
  """Decorate a function so that it composes with the user's code; see the module docstring.

  Args:
    static: Names of the arguments that are not arrays. They must be hashable.
    like: Position of a result -> name of the argument whose structure and sharding it has, for
      results that are not one array.
    also: Function of the PartitionSpecs of the annotated results, for a function that returns more.
  """

  def decorate(f):
    signature = inspect.signature(f)

    def call(**arguments):
      options = {name: arguments.pop(name) for name in static}
      # Weights keep their own axes: each operation that meets them makes them vary as needed.
      own = {name: arguments.pop(name) for name in ("self",) if name in arguments}
      run = lambda own, arrays: f(**own, **vary_together(arrays)[0], **options)
      mesh = jax.sharding.get_abstract_mesh()
      if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return run(own, arguments)
      out = also(_result_specs(signature, like or {}, arguments))
      return jax.sharding.auto_axes(run, out_sharding=out)(own, arguments)

    call.__name__ = call.__qualname__ = f.__name__
    compiled = jax.jit(call, static_argnames=static)

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
  """Return a list as a tuple, and an array of one number as that number."""
  if isinstance(x, list):
    return tuple(x)
  return x.item() if hasattr(x, "item") else x


def _result_specs(signature, like, arguments):
  """Return the PartitionSpecs of the results: an axis is sharded as the arguments shard its name.

  Axis names are those of the jaxtyping annotations.
  """
  by_axes, by_axis = {}, {}
  for name, x in arguments.items():
    for axes in _axis_names(signature.parameters[name].annotation):
      if hasattr(x, "ndim"):
        spec = by_axes.setdefault(axes, _spec(x))
        if len(axes) == x.ndim:
          for axis, entry in zip(axes, spec):
            by_axis.setdefault(axis, entry)

  def one(position, annotation):
    if position in like:
      return jax.tree.map(_spec, arguments[like[position]])
    alternatives = _axis_names(annotation)
    if not alternatives:
      return PartitionSpec()
    if alternatives[0] in by_axes:
      return by_axes[alternatives[0]]
    used, entries = set(), []
    for axis in alternatives[0]:
      entry = by_axis.get(axis)
      mesh_axes = set(entry if isinstance(entry, tuple) else (entry,)) - {None}
      entries.append(None if used & mesh_axes else entry)
      used |= mesh_axes
    return PartitionSpec(*entries)

  annotation = signature.return_annotation
  if typing.get_origin(annotation) is not tuple:
    return one(0, annotation)
  return tuple(one(i, result) for i, result in enumerate(typing.get_args(annotation)))


def _axis_names(annotation) -> list[tuple[str, ...]]:
  """Return the axis names of each jaxtyping alternative of an annotation."""
  alternatives = typing.get_args(annotation) or (annotation,)
  return [tuple(a.dim_str.split()) for a in alternatives if hasattr(a, "dim_str")]


def _spec(x) -> PartitionSpec:
  """Return x's PartitionSpec with one entry for each axis."""
  spec = jax.typeof(x).sharding.spec
  return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))
