"""Checkpoints on object storage: arrays written by TensorStore, each process its own shards.

orbax (0.12) writes to gs:// but not to s3://, and takes no other endpoint. The layout here is the
same for both, and the same as that of a local checkpoint except for the arrays: each is a zarr
array `<item>/<name>/`, with names, shapes and dtypes of all in `<item>/arrays.json`. The object
`meta/metadata` is written last: a step without it is incomplete.
"""

import json
import pathlib
import threading

import jax
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils

from deltanet_jax.config import CheckpointConfig
from deltanet_jax.files import write_json
from deltanet_jax.object_storage import ObjectPath

INDEX = "arrays.json"


def by_path(tree) -> dict:
  """Return the leaves of a pytree by their path, for containers of any kind."""
  is_leaf = lambda x: hasattr(x, "shape")
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  key = lambda part: str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
  return {".".join(map(key, path)): leaf for path, leaf in leaves if is_leaf(leaf)}


def _spec(folder: pathlib.Path, name: str) -> dict:
  path = folder / name
  if isinstance(path, ObjectPath):
    return dict(driver="zarr", kvstore=path.kvstore())
  return dict(driver="zarr", kvstore=dict(driver="file", path=f"{path.resolve()}/"))


def read(folder: pathlib.Path, shapes):
  """Read the arrays of an item with the shardings of `shapes`, each process its own shards.

  Raises:
    ValueError: with TensorStore's status, or because names or shapes are not those of `shapes`.
  """
  expected = by_path(shapes)
  if stored_shapes(folder) != {name: tuple(x.shape) for name, x in expected.items()}:
    raise ValueError("the arrays have other names or shapes")
  opening = {name: ts.open(_spec(folder, name), open=True) for name in expected}
  reads = {}  # all of them are started before the first is needed
  for name, leaf in expected.items():
    store = opening[name].result()
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    reads[name] = {str(index): store[index].read() for index in indices}

  def array(name, leaf):
    part = lambda index: np.asarray(reads[name][str(index)].result(), leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

  arrays = [array(name, leaf) for name, leaf in expected.items()]
  return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def stored_shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
  """Return the shapes of the arrays of an item, by name."""
  index = json.loads((folder / INDEX).read_text())
  return {name: tuple(one["shape"]) for name, one in index.items()}


class _Array:
  """The shards of one array that this process writes, in host memory."""

  def __init__(self, array: jax.Array):
    self.shape, self.dtype = array.shape, np.dtype(array.dtype)
    # One chunk per shard: no two processes write the same object.
    self._chunks = array.sharding.shard_shape(array.shape)
    self._shards = [(x.index, x.data) for x in array.addressable_shards if x.replica_id == 0]
    for _, data in self._shards:
      data.copy_to_host_async()

  def to_host(self):
    # A copy: the update donates the buffers of the state.
    self._shards = [(index, np.array(data)) for index, data in self._shards]

  def write(self, folder: ObjectPath, name: str, *, create: bool) -> list[ts.Future]:
    """Start all writes of this array.

    Args:
      create: also write the metadata of the array, as one process does.
    """
    spec = _spec(folder, name) | dict(
      metadata=dict(
        shape=list(self.shape),
        chunks=[max(n, 1) for n in self._chunks],
        dtype=self.dtype.str,
        compressor=None,
        fill_value=None,
        order="C",
      ),
      store_data_equal_to_fill_value=True,
    )
    created = [ts.open(spec, create=True, open=True)] if create else []
    store = ts.open(spec, open=True, assume_metadata=True).result()  # reads nothing
    return created + [store[index].write(data).commit for index, data in self._shards]


class ArrayStore:
  """Saves checkpoints of one run on object storage and deletes old ones.

  One process saves in a background thread. With several, `save` returns when the checkpoint is
  complete, because they have to wait for one another before it is marked as such.
  """

  def __init__(self, folder: ObjectPath, cfg: CheckpointConfig):
    self._folder, self._cfg = folder, cfg
    self._thread = self._error = None
    if jax.process_index() == 0:
      complete = set(map(str, steps(folder)))
      for path in folder.iterdir():
        if path.name not in complete:
          path.remove_tree()  # of an interrupted save

  def all_steps(self) -> list[int]:
    return steps(self._folder)

  def save(self, step: int, items: dict, meta: dict):
    """Start to save the arrays of `items`; `meta` is JSON and contains step and checksums."""
    self.wait_until_finished()
    arrays = {
      item: {name: _Array(x) for name, x in by_path(tree).items()} for item, tree in items.items()
    }
    for array in (x for item in arrays.values() for x in item.values()):
      array.to_host()
    folder = self._folder / str(step)
    if jax.process_count() > 1:
      self._save(folder, arrays, meta)
      return
    self._thread = threading.Thread(target=self._try, args=(folder, arrays, meta))
    self._thread.start()

  def _try(self, *args):
    try:
      self._save(*args)
    except Exception as e:
      self._error = e  # raised by the next call

  def _save(self, folder, arrays, meta):
    first = jax.process_index() == 0
    problem = None
    try:
      written = [
        future
        for item, named in arrays.items()
        for name, array in named.items()
        for future in array.write(folder / item, name, create=first)
      ]
      for future in written:
        future.result()
      if first:
        for item, named in arrays.items():
          facts = {n: dict(shape=x.shape, dtype=x.dtype.name) for n, x in named.items()}
          write_json(folder / item / INDEX, facts)
    except Exception as e:
      problem = e
    if jax.process_count() > 1:
      failed = multihost_utils.process_allgather(np.asarray(problem is not None))
      if problem is None and failed.any():
        problem = OSError("another process could not write its arrays")
    if problem is not None:
      raise problem
    if first:
      write_json(folder / "meta/metadata", meta)
      self._delete_old()

  def _delete_old(self):
    kept = self.all_steps()
    for step in kept[: -self._cfg.keep] if self._cfg.keep else ():
      if not self._cfg.keep_every or step % self._cfg.keep_every:
        remove(self._folder / str(step))

  def reload(self):
    """Do nothing: steps are listed anew each time."""

  def wait_until_finished(self):
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def close(self):
    self.wait_until_finished()


def steps(folder: ObjectPath) -> list[int]:
  """Return the steps of all complete checkpoints, oldest first."""
  names = (path.parts[-3:] for path in folder.objects())
  return sorted(int(n[0]) for n in names if n[1:] == ("meta", "metadata") and n[0].isdigit())


def remove(folder: ObjectPath):
  """Delete a checkpoint; it is incomplete from the first moment on."""
  (folder / "meta/metadata").unlink()
  folder.remove_tree()
