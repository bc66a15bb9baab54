"""Write and restore checkpoints atomically: state, step, configuration, checksums."""

import pathlib

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from deltanet_jax.config import CheckpointConfig
from deltanet_jax.object_storage import ObjectPath
from deltanet_jax.train import array_store
from deltanet_jax.train.checkpoint_reader import (
  DAMAGED,
  FOLDER,
  DamageError,
  OtherModelError,
  check_sum,
  checksum,
  read_arrays,
  read_meta,
  saved_steps,
)
from deltanet_jax.train.multihost import raise_together
from deltanet_jax.train.orbax_errors import silence_background_errors
from deltanet_jax.train.step import State


def _items(state: State) -> dict:
  """Split a state into weights and the rest, so that readers can load the weights alone."""
  return dict(weights=state["weights"], rest={k: x for k, x in state.items() if k != "weights"})


def all_damaged(workdir: pathlib.Path) -> bool:
  """Whether every checkpoint of a run was damaged and moved away."""
  folder = workdir / DAMAGED
  return folder.is_dir() and any(folder.iterdir()) and not saved_steps(workdir)


class Checkpoints:
  """The checkpoints of one run, saved asynchronously."""

  def __init__(self, workdir: pathlib.Path, cfg: CheckpointConfig):
    self.workdir = workdir
    self._failed = False
    self._orbax = not isinstance(workdir, ObjectPath)
    if not self._orbax:
      self._manager = array_store.ArrayStore(workdir / FOLDER, cfg)
      return
    options = ocp.CheckpointManagerOptions(
      max_to_keep=cfg.keep,
      keep_period=cfg.keep_every,
      # An interrupted save leaves a temporary folder, which is deleted here.
      cleanup_tmp_directories=True,
    )
    silence_background_errors()
    self._manager = ocp.CheckpointManager((workdir / FOLDER).resolve(), options=options)

  def save(self, step: int, state: State, meta: dict):
    """Start an asynchronous save; `meta` is JSON: configuration and identity of the task."""
    if step in self._manager.all_steps():
      return
    items = _items(state)
    sums = {name: checksum(arrays) for name, arrays in items.items()}
    meta = meta | {"step": step, "checksums": sums}
    if not self._orbax:
      self._write(lambda: self._manager.save(step, items, meta))
      return
    args = {name: ocp.args.StandardSave(arrays) for name, arrays in items.items()}
    args["meta"] = ocp.args.JsonSave(meta)
    self._write(lambda: self._manager.save(step, args=ocp.args.Composite(**args), force=True))

  def restore(self, shapes: State, report=print) -> tuple[State, dict] | None:
    """Return state and meta of the newest intact checkpoint; None if there is no checkpoint.

    A provably damaged checkpoint is moved to `damaged/`, never deleted, and the previous one is
    restored. Any other error changes nothing on disk.

    Args:
      shapes: the state with shardings.
    """
    for step in reversed(saved_steps(self.workdir)):
      try:
        items, meta = self._restore(step, _items(shapes))
        return dict(weights=items["weights"], **items["rest"]), meta
      except DamageError as e:
        report(f"checkpoint {step} is damaged ({e}); moved to {self._move_away(step)}.")
    return None

  def _restore(self, step, shapes):
    folder = self.workdir / FOLDER / str(step)
    items = meta = problem = None
    try:
      meta = read_meta(folder)
      items = {name: read_arrays(folder / name, item) for name, item in shapes.items()}
    except (DamageError, OtherModelError, OSError) as e:
      problem = e
    raise_together(problem, "the checkpoint")
    for name, arrays in items.items():
      check_sum(name, arrays, meta["checksums"][name])
    return items, meta

  def _move_away(self, step) -> pathlib.Path:
    target = self.workdir / DAMAGED / str(step)
    if jax.process_index() == 0:
      target.parent.mkdir(exist_ok=True)
      while target.exists():
        target = target.with_name(target.name + "+")
      (self.workdir / FOLDER / str(step)).rename(target)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f"damaged {step}")
    self._manager.reload()
    return target

  def wait(self):
    """Return when all saves are complete on disk."""
    self._write(self._manager.wait_until_finished)

  def close(self):
    """Wait for all saves, unless one has failed already: closing would raise the same error."""
    if not self._failed:
      self._write(self._manager.close)

  def _write(self, write):
    try:
      return write()
    except Exception as e:  # any type, possibly of an earlier asynchronous save
      self._failed = True
      reason = (str(e).strip() or repr(e)).splitlines()[0][:200]
      raise OSError(
        f"a checkpoint could not be written to {self.workdir} ({reason}): earlier checkpoints are"
        " intact; check the disk and start again."
      ) from e
