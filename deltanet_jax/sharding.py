"""Logical axis rules: the only place that maps logical array axes to mesh axes.

Parameters and activations have logical axis names ("embed", "heads", ...); `RULES` maps each name
to the mesh axes that shard it, and `spec` turns names into a `PartitionSpec`. Without a mesh
(`jax.set_mesh`), or inside a `shard_map`, `constrain` returns its argument and `locally` only calls
its function, so the same code runs on one device.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor", "sequence")
RULES = {
  "batch": ("data", "fsdp"),
  "length": ("sequence",),
  "embed": ("fsdp",),  # of parameters; activations shard the batch instead
  "vocab": ("tensor",),
  "heads": ("tensor",),
  # A mixer needs the full sequence on each device, so the sequence axis shards heads instead.
  "mixing_heads": ("tensor", "sequence"),
  "mlp": ("tensor",),
  "layers": (),  # replicated
}


def spec(*names: str | None) -> PartitionSpec:
  """The PartitionSpec of an array with these logical axes; None is a replicated axis."""
  return PartitionSpec(*(RULES[name] or None if name else None for name in names))


def make_mesh(sizes: dict[str, int], devices=None) -> Mesh:
  """A device mesh with `AXES`; a size of -1 means all remaining devices.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = {axis: sizes[axis] for axis in AXES}
  given = math.prod(size for size in sizes.values() if size != -1)
  if -1 in sizes.values() and len(devices) % given == 0:
    sizes = {axis: len(devices) // given if n == -1 else n for axis, n in sizes.items()}
  shown = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
  if math.prod(sizes.values()) != len(devices):
    raise ValueError(
      f"the mesh {shown} does not fit {len(devices)} devices: the sizes must multiply to that"
      " (-1: all remaining devices)."
    )
  if len(devices) == 1 or devices[0].platform == "cpu":
    arranged = np.asarray(devices).reshape(tuple(sizes.values()))
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))
  # Chooses a device order in which neighbors in the mesh are neighbors in the interconnect.
  return jax.make_mesh(
    tuple(sizes.values()), AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES)
  )


def named(mesh: Mesh, *names: str | None) -> NamedSharding:
  """The NamedSharding of an array with these logical axes."""
  return NamedSharding(mesh, spec(*names))


def check_divides(mesh, name: str | None, size: int, what: str):
  """Raise ValueError if the mesh cannot shard a logical axis of this size evenly.

  Args:
    what: describes the axis in the message.
  """
  axes = RULES[name] if name else ()
  shards = math.prod(mesh.shape[axis] for axis in axes)
  if size % shards:
    raise ValueError(
      f"{what} is {size}, expected a multiple of {shards} to shard it over the mesh axes"
      f" {' x '.join(f'{axis} {mesh.shape[axis]}' for axis in axes)}."
    )


def splits(name: str) -> bool:
  """Whether the current mesh shards this logical axis over more than one device."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.are_all_axes_manual:
    return False
  return any(mesh.shape[axis] > 1 for axis in RULES[name])


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """`with_sharding_constraint` of x by its logical axes, on the current mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.are_all_axes_manual:
    return x
  return jax.lax.with_sharding_constraint(x, spec(*names))


def locally(f, arguments, names, out_names):
  """Compute f(*arguments) under `shard_map`: each device applies f to its local shards.

  The SPMD partitioner cannot partition a Pallas kernel and would insert all-gathers around scans;
  `shard_map` leaves it no choice.

  Args:
    arguments: arrays, or None for a missing optional one.
    names: the logical axes of each argument.
    out_names: the logical axes of each result of f.

  Raises:
    ValueError: the mesh does not shard an axis evenly.
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
