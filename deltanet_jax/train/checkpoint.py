"""Checkpoints that are whole or not there: state, step, configuration, checksum."""

import pathlib

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from deltanet_jax.config import CheckpointConfig
from deltanet_jax.train.checkpoint_reader import (
  DAMAGED,
  FOLDER,
  DamageError,
  check_sum,
  checksum,
  raise_only,
  read_arrays,
  read_meta,
  saved_steps,
)
from deltanet_jax.train.multihost import raise_together
from deltanet_jax.train.step import State


def _items(state: State) -> dict:
  """Weights apart from the rest, so that they can be read alone."""
  return dict(weights=state["weights"], rest={k: x for k, x in state.items() if k != "weights"})


def all_damaged(workdir: pathlib.Path) -> bool:
  """Whether a run has lost all it had saved."""
  folder = workdir / DAMAGED
  return folder.is_dir() and any(folder.iterdir()) and not saved_steps(workdir)


class Checkpoints:
  """The checkpoints of one run, written in the background while training goes on."""

  def __init__(self, workdir: pathlib.Path, cfg: CheckpointConfig):
    self.workdir = workdir
    self._failed = False
    options = ocp.CheckpointManagerOptions(
      max_to_keep=cfg.keep,
      keep_period=cfg.keep_every,
      # A save that was cut off leaves a folder that does not count; it goes at the next start.
      cleanup_tmp_directories=True,
    )
    raise_only()
    self._manager = ocp.CheckpointManager((workdir / FOLDER).resolve(), options=options)

  def save(self, step: int, state: State, meta: dict):
    """Begins to write; `meta` is JSON: configuration and identity of the task."""
    if step in self._manager.all_steps():
      return
    items = _items(state)
    sums = {name: checksum(arrays) for name, arrays in items.items()}
    args = {name: ocp.args.StandardSave(arrays) for name, arrays in items.items()}
    args["meta"] = ocp.args.JsonSave(meta | {"step": step, "checksums": sums})
    self._writing(lambda: self._manager.save(step, args=ocp.args.Composite(**args), force=True))

  def restore(self, shapes: State, report=print) -> tuple[State, dict] | None:
    """State and meta of the newest whole checkpoint, on the devices that `shapes` names.

    One that is proved to be damaged is moved aside, never deleted, and the one before it is taken.
    Any other error leaves all in place. None if there is no checkpoint.
    """
    for step in reversed(saved_steps(self.workdir)):
      try:
        items, meta = self._restore(step, _items(shapes))
        return dict(weights=items["weights"], **items["rest"]), meta
      except DamageError as e:
        report(f"checkpoint {step} is damaged ({e}); moved to {self._put_aside(step)}.")
    return None

  def _restore(self, step, shapes):
    folder = self.workdir / FOLDER / str(step)
    items = meta = problem = None
    try:
      meta = read_meta(folder)
      items = {name: read_arrays(folder / name, item) for name, item in shapes.items()}
    except (DamageError, OSError) as e:
      problem = e
    raise_together(problem, "the checkpoint")
    for name, arrays in items.items():
      check_sum(name, arrays, meta["checksums"][name])
    return items, meta

  def _put_aside(self, step) -> pathlib.Path:
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
    """Returns when everything is on disk."""
    self._writing(self._manager.wait_until_finished)

  def close(self):
    if not self._failed:  # else it would only tell again
      self._writing(self._manager.close)

  def _writing(self, write):
    try:
      return write()
    except Exception as e:  # of a save that began earlier, too: storage raises anything
      self._failed = True
      reason = (str(e).strip() or repr(e)).splitlines()[0][:200]
      raise OSError(
        f"a checkpoint could not be written to {self.workdir} ({reason}): those before it are"
        " whole; look at the disk and start again."
      ) from e
