"""Tiles that were fastest on this machine's GPU, before which the kernels' own tables give way.

`python -m experiments.device_check` measures and writes them.
"""

import contextlib
import functools
import json
import pathlib

from pallas_kernels.common import gpu

FILE = pathlib.Path(__file__).with_name("measured_tiles.json")
_forced: dict[str, tuple[int, ...]] = {}


def find(kernel: str, dtype: str, key_size: int) -> tuple[int, ...] | None:
  """The tile of a kernel for this dtype and padded head size of keys, None if none was measured."""
  if kernel in _forced:
    return _forced[kernel]
  tile = _read().get(gpu.device_kind(), {}).get(name(kernel, dtype, key_size))
  return None if tile is None else tuple(tile)


def name(kernel: str, dtype: str, key_size: int) -> str:
  return f"{kernel} {dtype} {key_size}"


@contextlib.contextmanager
def forced(tiles: dict[str, tuple[int, ...]]):
  """Kernels traced inside take these tiles."""
  before = dict(_forced)
  _forced.update(tiles)
  try:
    yield
  finally:
    _forced.clear()
    _forced.update(before)


def write(device_kind: str, tiles: dict[str, tuple[int, ...]]):
  """Adds the tiles of a device, by `name`, to the file."""
  known = _read()
  merged = known | {device_kind: known.get(device_kind, {}) | tiles}
  FILE.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
  _read.cache_clear()


@functools.cache
def _read():
  return json.loads(FILE.read_text()) if FILE.exists() else {}
