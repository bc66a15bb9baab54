"""Manual mesh axes inside `jax.shard_map`: which arrays vary over which axes.

`shard_map(check_vma=True)` types every array with the mesh axes over which its value differs
between devices. A loop carry or an output must have the type of what is computed from it, so
operators make all of their arrays vary over the same axes first.
"""

import jax
from jax import lax


def varying_axes(*arrays) -> frozenset:
  """Return the manual mesh axes over which any leaf of these pytrees varies."""
  return frozenset().union(*(_axes(x) for x in jax.tree.leaves(arrays)))


def vary_over(tree, axes):
  """Return the arrays of a pytree, typed as varying over at least these mesh axes."""

  def one(x):
    missing = tuple(sorted(axes - _axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(one, tree) if axes else tree


def vary_together(*trees):
  """Return the pytrees with all leaves varying over the same mesh axes."""
  return vary_over(trees, varying_axes(*trees))


def _axes(x):
  return jax.typeof(x).manual_axis_type.varying
