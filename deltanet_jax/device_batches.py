"""Transfer NumPy batches to global arrays on the mesh; a process reads only its own sequences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deltanet_jax import sharding

_DTYPES = dict(tokens="int32", targets="int32", segment_ids="int32", mask="bool")


def batch_shapes(mesh: Mesh, batch: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the global shapes `[batch, length]` of a batch with their sharding."""
  placed = sharding.named(mesh, "batch", "length")
  return {
    name: jax.ShapeDtypeStruct((batch, length), jnp.dtype(dtype), sharding=placed)
    for name, dtype in _DTYPES.items()
  }


def host_share(shape: jax.ShapeDtypeStruct) -> tuple[int, int]:
  """Return (host, hosts): which equal part of the batch this process's devices hold.

  Processes that hold the same sequences (a `tensor` axis over several hosts) get the same part. If
  the batch does not split into equal parts, every process reads all of it: (0, 1).
  """
  B = shape.shape[0]
  indices = shape.sharding.addressable_devices_indices_map(shape.shape).values()
  spans = sorted({index[0].indices(B)[:2] for index in indices})
  first, size = spans[0][0], spans[-1][1] - spans[0][0]
  gaps = any(a[1] < b[0] for a, b in itertools.pairwise(spans))
  if gaps or B % size or first % size:
    return 0, 1
  return first // size, B // size


def own_share(batch: dict[str, np.ndarray], shape: jax.ShapeDtypeStruct) -> dict[str, np.ndarray]:
  """Return this process's sequences of a batch that it holds completely."""
  host, hosts = host_share(shape)
  size = shape.shape[0] // hosts
  return {name: x[host * size : (host + 1) * size] for name, x in batch.items()}


def check_batch(
  batch: dict[str, np.ndarray],
  shapes: dict[str, jax.ShapeDtypeStruct],
  *,
  vocab: int,
  what: str,
  scored: bool = False,
):
  """Raise ValueError for a batch that the loss would misread: JAX clamps ids and casts masks.

  Takes 0.1 ms for 2^19 tokens.

  Args:
    batch: this process's sequences.
    shapes: global shapes of a batch.
    vocab: number of token ids; targets that are not scored may be anything.
    what: names the batch in messages.
    scored: require at least one scored target.
  """
  _, hosts = host_share(shapes["tokens"])
  B, L = shapes["tokens"].shape
  expected = (B // hosts, L)
  for name in shapes:
    if name not in batch:
      raise ValueError(f"{what} has no {name}, expected {list(shapes)}.")
    shape, dtype = np.shape(batch[name]), getattr(batch[name], "dtype", None)
    kind = "bool (True for scored targets)" if name == "mask" else "int32"
    good = isinstance(dtype, np.dtype) and dtype.kind in ("b" if name == "mask" else "iu")
    if not good:
      raise ValueError(f"{what} has {name} of dtype {dtype}, expected a NumPy array of {kind}.")
    if shape != expected:
      raise ValueError(
        f"{what} has {name} of shape {list(shape)}, expected {list(expected)}, sequences of this"
        " host times length."
      )
  for name in ("tokens", "targets"):
    ids = batch[name]
    if ids.min() >= 0 and ids.max() < vocab:
      continue
    ids = ids if name == "tokens" else ids[batch["mask"]]
    if wrong := ids[(ids < 0) | (ids >= vocab)].tolist():
      raise ValueError(
        f"{what} has the id {wrong[0]} in {name}, expected ids of the vocabulary, 0 to {vocab - 1}."
      )
  if scored and hosts == 1 and not batch["mask"].any():
    raise ValueError(f"{what} has a mask that is False everywhere, expected scored targets.")


def to_devices(
  batch: dict[str, np.ndarray],
  shapes: dict[str, jax.ShapeDtypeStruct],
  max_targets: int | None = None,
) -> dict[str, jax.Array]:
  """Return the global arrays of which `batch` holds this process's sequences.

  Args:
    max_targets: `data.scored`; a sequence with more scored targets raises ValueError, because the
      loss would ignore some of them. None allows any number.
  """
  if max_targets is not None and (most := batch["mask"].sum(axis=1).max()) > max_targets:
    raise ValueError(
      f"a sequence has {most} scored targets, but data.scored is {max_targets}: raise it, or leave"
      " it unset."
    )

  def one(shape, sequences):
    host, _ = host_share(shape)
    start = host * len(sequences)

    def part(index):
      low, high, _ = index[0].indices(shape.shape[0])
      return sequences[low - start : high - start, index[1]].astype(shape.dtype, copy=False)

    return jax.make_array_from_callback(shape.shape, shape.sharding, part)

  return {name: one(shape, batch[name]) for name, shape in shapes.items()}
