"""Reads checkpoints, of live runs too, and tells damage from a disk that fails; never writes."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import pathlib
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

FOLDER = "checkpoints"
DAMAGED = "damaged"  # folder that damaged checkpoints are moved to
_READING = threading.Lock()  # what is read quietly is read by one thread at a time
_META = "meta/metadata"
_ANSWER = asyncio.BaseEventLoop.call_soon_threadsafe.__code__
# What the storage library answers where the bytes are not those that were written. Its other
# answers (UNKNOWN for an I/O error, RESOURCE_EXHAUSTED, PERMISSION_DENIED) prove nothing.
_DAMAGE = {
  "NOT_FOUND": "a file is missing",
  "OUT_OF_RANGE": "a file is truncated",
  "DATA_LOSS": "its content cannot be decoded",
  "INVALID_ARGUMENT": "its content cannot be decoded",
  "FAILED_PRECONDITION": "its content cannot be decoded",
}


class DamageError(ValueError):
  """What is on disk is proved to be other than what was written."""


def _in_storage(trace) -> bool:
  """Whether an error began in the storage library, or in its late answer to an event loop.

  Other writes of a save that has failed end when nobody waits any more: their callbacks, started by
  no Python code, find the loop closed. Reads of a damaged checkpoint end alike.
  """
  code = trace.tb_frame.f_code if trace is not None else None
  return code is not None and (code is _ANSWER or "orbax" in code.co_filename)


def _of_others(record: logging.LogRecord) -> bool:
  """Whether it is no error of the storage library: logged by it, or left in a task of it."""
  trace = record.exc_info[2] if record.exc_info else None
  own = "orbax" in record.pathname or _in_storage(trace)
  return record.levelno < logging.ERROR or not own


@dataclasses.dataclass(frozen=True)
class _Hook:
  """A sys.unraisablehook that leaves out the storage library's errors: it raises them to us too."""

  before: Callable

  def __call__(self, told):
    if not _in_storage(told.exc_traceback):
      self.before(told)


def raise_only():
  """Has the storage library print no tracebacks of its threads: it raises the same errors to us."""
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_of_others)  # once, however often it is asked
  warnings.filterwarnings("ignore", "coroutine 'async_serialize.*was never awaited", RuntimeWarning)
  if not isinstance(sys.unraisablehook, _Hook):
    sys.unraisablehook = _Hook(sys.unraisablehook)


@jax.jit
def _checksum(arrays):
  """Sum of all bits, as numbers modulo 2^32: exact in any order, so on any mesh."""
  bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32).sum(dtype=jnp.uint32)
  return sum(jax.tree.leaves(jax.tree.map(bits, arrays)), start=jnp.zeros((), jnp.uint32))


def checksum(arrays) -> int:
  return int(np.asarray(_checksum(arrays)))


def check_sum(name: str, arrays, expected: int):
  if (found := checksum(arrays)) != expected:
    raise DamageError(f"the checksum of its {name} is {found}, expected {expected}")


def saved_steps(workdir: pathlib.Path) -> list[int]:
  """Steps of the checkpoints, oldest first; one that is being written does not count."""
  folder = pathlib.Path(workdir) / FOLDER
  names = (p.name for p in folder.iterdir()) if folder.is_dir() else ()
  return sorted(int(name) for name in names if name.isdigit())


def read_meta(folder: pathlib.Path) -> dict:
  """The JSON part of a checkpoint."""

  def read():
    meta = json.loads((folder / _META).read_bytes())
    if not isinstance(meta, dict) or not {"step", "checksums"} <= meta.keys():
      raise DamageError("its step and checksums are missing")
    if str(meta["step"]) != folder.name:
      raise DamageError(f"it says that its step is {meta['step']}")
    return meta

  return _read_twice(folder, read)


def read_arrays(folder: pathlib.Path, shapes) -> Any:
  """Restore the arrays of one item of a checkpoint with the shardings of `shapes`.

  Raises:
    DamageError: the files are damaged.
    OSError: the files cannot be read.
  """
  own = ocp.options.MultiprocessingOptions(
    # Each process reads its part and waits for nobody: another may meet an error.
    primary_host=jax.process_index(),
    active_processes={jax.process_index()},
    barrier_sync_key_prefix=f"read_by_{jax.process_index()}",
  )

  def read():
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=own)
    with warnings.catch_warnings():
      # Asked for on purpose: the checkpoint may come from another mesh.
      warnings.filterwarnings("ignore", message=".*[Ss]harding.*")
      with ocp.Checkpointer(handler, multiprocessing_options=own) as checkpointer:
        return checkpointer.restore(folder.resolve(), args=ocp.args.StandardRestore(shapes))

  return _read_twice(folder, read)


def read_weights(
  workdir: pathlib.Path, shapes: dict, step: int | None = None, report=print
) -> tuple[dict, dict]:
  """Weights and meta of a checkpoint, by default of the newest whole one.

  The run may be training: where it deletes what is being read, or has saved anew, this looks again.
  """
  damaged = {}
  while True:
    steps = saved_steps(workdir)
    if step is not None and step not in steps:
      raise ValueError(f"{workdir} has no checkpoint of step {step}, only of {steps}.")
    left = [s for s in (steps if step is None else [step]) if s not in damaged]
    if not left and damaged:
      told = "; ".join(f"{s} is damaged ({damaged[s]})" for s in sorted(damaged))
      raise ValueError(f"{workdir} has no intact checkpoint: {told}.")
    if not left and (moved := workdir / DAMAGED).is_dir() and any(moved.iterdir()):
      raise ValueError(
        f"{workdir} has no checkpoint left: all of them were damaged and moved to {moved}."
      )
    if not left:
      raise ValueError(f"{workdir} has no checkpoint yet.")
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
      report(f"checkpoint {other} of {workdir} is damaged ({damaged[other]}): {newest} is taken.")
    return weights, meta


def _read_twice(folder, read):
  """What `read` returns; damage only where files can be read and their content twice not."""
  with quiet():
    try:
      return read()
    except Exception as e:
      _damage_in(e, folder)
    try:
      for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
          while file.read(1 << 24):
            pass
    except FileNotFoundError:
      pass  # a run deletes it just now; the second try tells
    except OSError as e:
      raise _unreadable(e, folder) from e
    try:
      return read()
    except Exception as e:
      raise DamageError(_damage_in(e, folder)) from None


def _damage_in(error, folder) -> str:
  """What is damaged, if this error proves that; raises OSError if it does not."""
  while cause := error.__cause__ or error.__context__:
    error = cause
  if isinstance(error, DamageError):
    return str(error)
  if isinstance(error, FileNotFoundError):
    return _DAMAGE["NOT_FOUND"]
  # Not every ValueError or KeyError: it may as well be of a library that was changed.
  if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
    return _DAMAGE["DATA_LOSS"]
  status = str(error).split(":", 1)[0]
  if not isinstance(error, ValueError) or status not in _DAMAGE:
    raise _unreadable(error, folder) from error
  return _DAMAGE[status]


def _unreadable(error, folder) -> OSError:
  reason = getattr(error, "strerror", None) or (str(error).strip() or repr(error)).splitlines()[0]
  return OSError(
    f"{folder} cannot be read ({reason[:200]}): that proves no damage and nothing was changed; try"
    " again, or move it away to do without it."
  )


@contextlib.contextmanager
def quiet():
  """Without the hundreds of lines that the storage library prints when a part of its work fails."""
  log, ignore = logging.getLogger("asyncio"), lambda *_: None
  with _READING:
    before = sys.excepthook, sys.unraisablehook, log.level
    sys.excepthook = sys.unraisablehook = ignore
    log.setLevel(logging.CRITICAL + 1)
    try:
      yield
    except BaseException:
      # They end soon, and what they leave is told when it is collected.
      time.sleep(0.2)
      gc.collect()
      raise
    finally:
      sys.excepthook, sys.unraisablehook, level = before
      log.setLevel(level)
