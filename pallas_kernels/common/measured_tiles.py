"""Cache of GPU tile sizes measured on this machine; they take precedence over the built-in tables.

`python -m experiments.device_check` measures and writes them. The file is measured_tiles.json in
$DELTANET_JAX_CACHE, else in $XDG_CACHE_HOME/deltanet_jax, else in ~/.cache/deltanet_jax:

  {device kind: {"<kernel> <dtype> <padded key size>": [tile sizes, warps, stages]}}
"""

import contextlib
import functools
import json
import os
import pathlib
import tempfile

import jax

from pallas_kernels.common import gpu

# A user context is part of the key of JAX's caches: a trace with other tiles is not reused.
_overrides = jax.make_user_context(())


def cache_file() -> pathlib.Path:
  """Return the path of the cache file, which may not exist."""
  if folder := os.environ.get("DELTANET_JAX_CACHE"):
    return pathlib.Path(folder, "measured_tiles.json")
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base, "deltanet_jax", "measured_tiles.json")


def find(kernel: str, dtype: str, key_size: int) -> tuple[int, ...] | None:
  """Return the measured tile of a kernel for this dtype and padded key size; None if unmeasured."""
  if tile := dict(_overrides.value).get(kernel):
    return tile
  device = gpu.device_kind()
  if device is None:
    return None
  tile = _read(cache_file()).get(device, {}).get(entry(kernel, dtype, key_size))
  return None if tile is None else tuple(tile)


def entry(kernel: str, dtype: str, key_size: int) -> str:
  """Return the key of a tile in the cache file."""
  return f"{kernel} {dtype} {key_size}"


def override(tiles: dict[str, tuple[int, ...]]) -> contextlib.AbstractContextManager:
  """Use these tiles (kernel -> tile) for kernels traced inside the context."""
  return _overrides(tuple(sorted((dict(_overrides.value) | tiles).items())))


def write(device_kind: str, tiles: dict[str, tuple[int, ...]]) -> pathlib.Path:
  """Add the tiles of a device, keyed by `entry`, to the cache file atomically; return its path."""
  path = cache_file()
  known = _read(path)
  merged = known | {device_kind: known.get(device_kind, {}) | tiles}
  path.parent.mkdir(parents=True, exist_ok=True)
  handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
  try:
    with os.fdopen(handle, "w") as file:
      file.write(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, path)
  except BaseException:
    os.unlink(temporary)
    raise
  _read.cache_clear()
  return path


@functools.cache
def _read(path):
  try:
    text = path.read_text()
  except FileNotFoundError:
    return {}
  try:
    known = json.loads(text)
    if not all(isinstance(tiles, dict) for tiles in known.values()):
      raise TypeError
  except (ValueError, TypeError, AttributeError):
    raise ValueError(
      f"{path} is not a valid cache of measured GPU tiles; delete it and, to measure again, run"
      " `python -m experiments.device_check`."
    ) from None
  return known
