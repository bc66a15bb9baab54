"""Batches of numpy rows to arrays on the mesh; every process reads the rows it holds."""

import itertools

import jax
import numpy as np


def host_share(shape: jax.ShapeDtypeStruct) -> tuple[int, int]:
  """(host, hosts): which of how many equal parts of the rows this process's devices hold.

  Processes that share rows (a `tensor` axis over several hosts) get the same part. Where rows do
  not fall into equal parts every process reads all of them.
  """
  B = shape.shape[0]
  indices = shape.sharding.addressable_devices_indices_map(shape.shape).values()
  spans = sorted({index[0].indices(B)[:2] for index in indices})
  first, rows = spans[0][0], spans[-1][1] - spans[0][0]
  gaps = any(a[1] < b[0] for a, b in itertools.pairwise(spans))
  if gaps or B % rows or first % rows:
    return 0, 1
  return first // rows, B // rows


def to_devices(
  batch: dict[str, np.ndarray], shapes: dict, scored: int | None = None
) -> dict[str, jax.Array]:
  """The global arrays of which `batch` holds this process's rows.

  Args:
    scored: how many targets of a row may count, or the loss would leave some out; None for all.
  """
  if scored is not None and (most := batch["mask"].sum(axis=1).max()) > scored:
    raise ValueError(
      f"{most} targets of a row count, but data.scored is {scored}: raise it, or leave it unset."
    )

  def one(shape, rows):
    host, _ = host_share(shape)
    start = host * len(rows)

    def part(index):
      low, high, _ = index[0].indices(shape.shape[0])
      return rows[low - start : high - start, index[1]]

    return jax.make_array_from_callback(shape.shape, shape.sharding, part)

  return {name: one(shape, batch[name]) for name, shape in shapes.items()}
