"""Logical axis rules: the only place that maps logical array axes to mesh axes.

Parameters and activations have logical axis names ("embed", "heads", ...); `RULES` maps each name
to the mesh axes that shard it, `axis_rules` to those of the user's own mesh, and `spec` turns names
into a `PartitionSpec`. Without a mesh (`jax.set_mesh`), on a mesh with other axes, and inside a
`shard_map`, `constrain` returns its argument and `locally` only calls its function, so the same
code runs on one device.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

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


# Part of the key of jax's caches: a function traced with other rules is traced again.
_own_rules = jax.make_user_context(None)


def axis_rules(rules: Mapping[str, str | Sequence[str] | None]) -> AbstractContextManager:
  """Map logical axes to the axes of one's own mesh: `with axis_rules({"batch": "dp"}): ...`.

  Logical axes that are left out keep their `RULES`; "mixing_heads" follows "heads". Mesh axes that
  the current mesh does not have are ignored, so a model imposes no axis names on it.

  Args:
    rules: Mesh axes of each logical axis; None or () replicates it.

  Raises:
    ValueError: for an unknown logical axis.
  """
  if unknown := set(rules) - set(RULES):
    raise ValueError(f"unknown logical axes {sorted(unknown)}, expected some of {list(RULES)}.")
  as_tuple = lambda axes: (axes,) if isinstance(axes, str) else tuple(axes or ())
  own = {name: as_tuple(axes) for name, axes in rules.items()}
  if "heads" in own:
    own.setdefault("mixing_heads", own["heads"])
  return _own_rules(tuple(sorted(own.items())))


def mesh_axes(name: str | None, mesh) -> tuple[str, ...]:
  """The axes of the mesh that shard a logical axis, without those that are manual already."""
  if name is None:
    return ()
  axes = dict(_own_rules.value or ()).get(name, RULES[name])
  return tuple(axis for axis in axes if axis in _free_axes(mesh))


def _free_axes(mesh):
  types = zip(mesh.axis_names, mesh.axis_types)
  return [axis for axis, kind in types if kind != AxisType.Manual]


def _mapped_axes(mesh) -> set[str]:
  """The axes of the mesh that shard any logical axis."""
  return {axis for name in RULES for axis in mesh_axes(name, mesh)}


def spec(mesh, *names: str | None) -> PartitionSpec:
  """The PartitionSpec of an array with these logical axes; None is a replicated axis."""
  return PartitionSpec(*(mesh_axes(name, mesh) or None for name in names))


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
  return NamedSharding(mesh, spec(mesh, *names))


def check_divides(mesh, name: str | None, size: int, what: str):
  """Raise ValueError if the mesh cannot shard a logical axis of this size evenly.

  Args:
    what: describes the axis in the message.
  """
  axes = mesh_axes(name, mesh)
  shards = math.prod(mesh.shape[axis] for axis in axes)
  if size % shards:
    raise ValueError(
      f"{what} is {size}, expected a multiple of {shards} to shard it over the mesh axes"
      f" {' x '.join(f'{axis} {mesh.shape[axis]}' for axis in axes)}."
    )


def splits(name: str) -> bool:
  """Whether the current mesh shards this logical axis over more than one device."""
  mesh = jax.sharding.get_abstract_mesh()
  return any(mesh.shape[axis] > 1 for axis in mesh_axes(name, mesh))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """`with_sharding_constraint` of x by its logical axes, on the current mesh.

  Axes of the user's mesh that shard no logical axis are left to the partitioner.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not _mapped_axes(mesh):
    return x
  entries = zip(names, spec(mesh, *names))
  free = PartitionSpec.UNCONSTRAINED
  return jax.lax.with_sharding_constraint(
    x, PartitionSpec(*(free if entry is None and name else entry for name, entry in entries))
  )


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
  axes = _mapped_axes(mesh)
  if not axes:
    return f(*arguments)
  for x, logical in zip(arguments, names):
    if x is not None:
      for name, size in zip(logical, x.shape):
        what = "the number of heads" if name == "mixing_heads" else f"axis {name!r}"
        check_divides(mesh, name, size, what)
  return jax.shard_map(
    f,
    in_specs=tuple(spec(mesh, *logical) for logical in names),
    out_specs=tuple(spec(mesh, *logical) for logical in out_names),
    axis_names=axes,
  )(*arguments)
