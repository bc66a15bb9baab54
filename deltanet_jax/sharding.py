"""Which axis of a mesh holds which axis of an array: the only place that knows.

Weights and activations name their axes ("embed", "heads", ...); `RULES` maps names to the mesh.
Without a mesh (`jax.set_mesh`) everything here does nothing, so one device runs the same code.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor", "sequence")
RULES = {
  "batch": ("data", "fsdp"),
  "length": ("sequence",),
  "embed": ("fsdp",),  # of weights; activations are split by rows instead
  "vocab": ("tensor",),
  "heads": ("tensor",),
  # While mixing tokens a device needs all of them, so it takes fewer heads instead.
  "mixing_heads": ("tensor", "sequence"),
  "mlp": ("tensor",),
  "layers": (),
}


def spec(*names: str | None) -> PartitionSpec:
  """The partition of an array whose axes have these names; None is never split."""
  return PartitionSpec(*(RULES[name] or None if name else None for name in names))


def make_mesh(sizes: dict[str, int], devices=None) -> Mesh:
  """A mesh over all devices; a size of -1 takes what the others leave."""
  devices = jax.devices() if devices is None else devices
  sizes = {axis: sizes[axis] for axis in AXES}
  given = math.prod(size for size in sizes.values() if size != -1)
  if -1 in sizes.values() and len(devices) % given == 0:
    sizes = {axis: len(devices) // given if n == -1 else n for axis, n in sizes.items()}
  shown = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
  if math.prod(sizes.values()) != len(devices):
    raise ValueError(
      f"the mesh {shown} does not fit {len(devices)} devices: the sizes must multiply to that"
      " (-1 takes the rest)."
    )
  if len(devices) == 1 or devices[0].platform == "cpu":
    arranged = np.asarray(devices).reshape(tuple(sizes.values()))
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))
  # Neighbours in the mesh become neighbours in the network.
  return jax.make_mesh(
    tuple(sizes.values()), AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES)
  )


def named(mesh: Mesh, *names: str | None) -> NamedSharding:
  return NamedSharding(mesh, spec(*names))


def check_divides(mesh, name: str | None, size: int, what: str):
  """Refuses an axis of this name and size that the mesh cannot split evenly."""
  axes = RULES[name] if name else ()
  parts = math.prod(mesh.shape[axis] for axis in axes)
  if size % parts:
    raise ValueError(
      f"{what} is {size}, which {' x '.join(f'{axis} {mesh.shape[axis]}' for axis in axes)} of the"
      " mesh does not divide."
    )


def splits(name: str) -> bool:
  """Whether the mesh in use splits axes of this name."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.are_all_axes_manual:
    return False
  return any(mesh.shape[axis] > 1 for axis in RULES[name])


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """x, split over the mesh in use as its axes are named."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.are_all_axes_manual:
    return x
  return jax.lax.with_sharding_constraint(x, spec(*names))


def locally(f, arguments, names, out_names):
  """f(*arguments), computed by each device for its own rows and heads alone.

  The compiler cannot split a kernel, and would gather around scans; here nothing is left to it.

  Args:
    arguments: arrays, or None where an optional one is missing.
    names: the axis names of each argument.
    out_names: the same for each result of f.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.are_all_axes_manual:
    return f(*arguments)
  for x, axes in zip(arguments, names):
    if x is not None:
      for name, size in zip(axes, x.shape):
        what = "the number of heads" if name == "mixing_heads" else f"axis {name!r}"
        check_divides(mesh, name, size, what)
  return jax.shard_map(
    f,
    in_specs=tuple(spec(*axes) for axes in names),
    out_specs=tuple(spec(*axes) for axes in out_names),
    check_vma=False,
  )(*arguments)
