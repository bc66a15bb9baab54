"""Read checkpoints, also of a training run in progress; distinguish damage from I/O errors.

Nothing here writes. A checkpoint is `checkpoints/<step>/` with the items `weights` and `rest` (the
remaining state) and JSON in `meta`: step, checksums, configuration, identity of the task.
"""

import json
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from deltanet_jax.files import all_files, as_path, local_copy
from deltanet_jax.object_storage import ObjectPath
from deltanet_jax.train import array_store
from deltanet_jax.train.orbax_errors import silenced

FOLDER = "checkpoints"
DAMAGED = "damaged"  # folder that damaged checkpoints are moved to
_META = "meta/metadata"
# Status codes of TensorStore that prove that the files are not those that were written. Others
# (UNKNOWN for an I/O error, RESOURCE_EXHAUSTED, PERMISSION_DENIED) prove nothing.
_DAMAGE = {
  "NOT_FOUND": "a file is missing",
  "OUT_OF_RANGE": "a file is truncated",
  "DATA_LOSS": "its content cannot be decoded",
  "INVALID_ARGUMENT": "its content cannot be decoded",
  "FAILED_PRECONDITION": "its content cannot be decoded",
}


class DamageError(ValueError):
  """The files of a checkpoint are provably not those that were written."""


class OtherModelError(ValueError):
  """An intact checkpoint holds arrays of another model."""


@jax.jit
def _checksum(arrays):
  """Sum of all bits as integers modulo 2^32: exact in any order, so independent of the mesh."""

  def bits(x):
    if x.dtype == bool:
      words = x
    else:
      word = jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")
      words = jax.lax.bitcast_convert_type(x, word)
    return words.sum(dtype=jnp.uint32)

  return sum(jax.tree.leaves(jax.tree.map(bits, arrays)), start=jnp.zeros((), jnp.uint32))


def checksum(arrays) -> int:
  """Return a checksum of a pytree of arrays."""
  return int(np.asarray(_checksum(arrays)))


def check_sum(name: str, arrays, expected: int):
  """Raise DamageError if the checksum of an item is not the expected one."""
  if (found := checksum(arrays)) != expected:
    raise DamageError(f"the checksum of its {name} is {found}, expected {expected}")


def saved_steps(workdir: pathlib.Path) -> list[int]:
  """Return the steps of all complete checkpoints, oldest first."""
  folder = as_path(workdir) / FOLDER
  if isinstance(folder, ObjectPath):
    return array_store.steps(folder)
  names = (p.name for p in folder.iterdir()) if folder.is_dir() else ()
  return sorted(int(name) for name in names if name.isdigit())


def read_meta(folder: pathlib.Path) -> dict:
  """Return the JSON part of a checkpoint."""

  def read():
    meta = json.loads((folder / _META).read_bytes())
    if not isinstance(meta, dict) or not {"step", "checksums"} <= meta.keys():
      raise DamageError("its step and checksums are missing")
    if str(meta["step"]) != folder.name:
      raise DamageError(f"its metadata has step {meta['step']}")
    return meta

  return _read_twice(folder, read)


def read_arrays(folder: pathlib.Path, shapes) -> Any:
  """Restore the arrays of one item of a checkpoint with the shardings of `shapes`.

  Raises:
    DamageError: the files are damaged.
    OtherModelError: the names or shapes of the arrays are not those of `shapes`.
    OSError: the files cannot be read.
  """
  if (folder / array_store.INDEX).is_file():
    return _read_twice(folder, lambda: _read_stored(folder, shapes))
  own = ocp.options.MultiprocessingOptions(
    # Each process reads its part without a barrier: another one may raise an error.
    primary_host=jax.process_index(),
    active_processes={jax.process_index()},
    barrier_sync_key_prefix=f"read_by_{jax.process_index()}",
  )

  def read():
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=own)
    with warnings.catch_warnings():
      # Resharding is intended: the checkpoint may come from another mesh.
      warnings.filterwarnings("ignore", message=".*[Ss]harding.*")
      with ocp.Checkpointer(handler, multiprocessing_options=own) as checkpointer:
        try:
          with local_copy(folder) as local:  # orbax does not read s3://
            return checkpointer.restore(local.resolve(), args=ocp.args.StandardRestore(shapes))
        except Exception:
          _check_shapes(folder, lambda: _orbax_shapes(folder, handler), shapes)
          raise

  return _read_twice(folder, read)


def _read_stored(folder, shapes):
  """Read arrays that `array_store` has written."""
  try:
    return array_store.read(folder, shapes)
  except Exception:
    _check_shapes(folder, lambda: array_store.stored_shapes(folder), shapes)
    raise


def _orbax_shapes(folder, handler) -> dict[str, tuple]:
  with local_copy(folder) as local:
    stored = array_store.by_path(handler.metadata(local.resolve()))
  return {name: tuple(x.shape) for name, x in stored.items()}


def _check_shapes(folder, read_shapes, shapes):
  """Raise OtherModelError if the stored names and shapes are readable and not the expected ones."""
  try:
    stored = read_shapes()
  except Exception:
    return  # damaged: the caller reports the error of the restore
  expected = {name: tuple(x.shape) for name, x in array_store.by_path(shapes).items()}
  for name in sorted(stored.keys() | expected.keys()):
    if stored.get(name) != expected.get(name):
      has = f"shape {stored[name]}" if name in stored else "no such array"
      wants = f"shape {expected[name]}" if name in expected else "no such array"
      raise OtherModelError(
        f"{folder} is a checkpoint of another model than that of config.json: for {name} it has"
        f" {has}, the configuration has {wants}. Restore the original config.json, or move the"
        " checkpoint away."
      )


def read_weights(
  workdir: pathlib.Path, shapes: dict, step: int | None = None, report=print
) -> tuple[dict, dict]:
  """Return weights and meta of a checkpoint, by default of the newest intact one.

  The run may be training: if it deletes the checkpoint that is being read, this tries again.
  """
  damaged = {}
  while True:
    steps = saved_steps(workdir)
    if step is not None and step not in steps:
      raise ValueError(f"{workdir} has no checkpoint of step {step}, only of {steps}.")
    left = [s for s in (steps if step is None else [step]) if s not in damaged]
    if not left:
      raise ValueError(_no_checkpoint(workdir, damaged))
    newest = left[-1]
    folder = workdir / FOLDER / str(newest)
    try:
      meta = read_meta(folder)
      weights = read_arrays(folder / "weights", shapes)
      check_sum("weights", weights, meta["checksums"]["weights"])
    except (DamageError, OSError) as e:
      if newest not in saved_steps(workdir):
        continue
      if isinstance(e, OSError):
        raise
      damaged[newest] = str(e)
      continue
    for other in sorted(s for s in damaged if s > newest):
      report(
        f"checkpoint {other} of {workdir} is damaged ({damaged[other]}): using {newest} instead."
      )
    return weights, meta


def _no_checkpoint(workdir, damaged) -> str:
  if damaged:
    reasons = "; ".join(f"{s} is damaged ({damaged[s]})" for s in sorted(damaged))
    return f"{workdir} has no intact checkpoint: {reasons}."
  moved = workdir / DAMAGED
  if moved.is_dir() and any(moved.iterdir()):
    return f"{workdir} has no checkpoint left: all of them were damaged and moved to {moved}."
  return f"{workdir} has no checkpoint yet."


def _read_twice(folder, read):
  """Return `read()`; DamageError only if all files are readable and `read` fails twice."""
  with silenced():
    try:
      return read()
    except OtherModelError:
      raise
    except Exception as e:
      _damage(e, folder)
    try:
      for path in all_files(folder):
        with path.open("rb") as file:
          while file.read(1 << 24):
            pass
    except FileNotFoundError:
      pass  # a training run may be deleting it: the second attempt decides
    except OSError as e:
      raise _unreadable(e, folder) from e
    try:
      return read()
    except Exception as e:
      raise DamageError(_damage(e, folder)) from None


def _damage(error, folder) -> str:
  """Return what is damaged if this error proves damage, else raise OSError."""
  while cause := error.__cause__ or error.__context__:
    error = cause
  if isinstance(error, DamageError):
    return str(error)
  if isinstance(error, FileNotFoundError):
    return _DAMAGE["NOT_FOUND"]
  # Not every ValueError or KeyError: a change of a library may raise those as well.
  if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
    return _DAMAGE["DATA_LOSS"]
  status = str(error).split(":", 1)[0]
  if not isinstance(error, ValueError) or status not in _DAMAGE:
    raise _unreadable(error, folder) from error
  return _DAMAGE[status]


def _unreadable(error, folder) -> OSError:
  reason = getattr(error, "strerror", None) or (str(error).strip() or repr(error)).splitlines()[0]
  return OSError(
    f"{folder} cannot be read ({reason[:200]}): that does not prove damage and nothing was changed;"
    " try again, or move it away to continue without it."
  )
