"""Checkpoints that are whole or not there: state, step, configuration, checksum."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from deltanet_jax.config import CheckpointConfig
from deltanet_jax.train.step import State

FOLDER = "checkpoints"
DAMAGED = "damaged"


@jax.jit
def _checksum(arrays):
  """Sum of all bits, as numbers modulo 2^32: exact in any order, so on any mesh."""
  bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32).sum(dtype=jnp.uint32)
  return sum(jax.tree.leaves(jax.tree.map(bits, arrays)), start=jnp.zeros((), jnp.uint32))


def checksum(arrays) -> int:
  return int(np.asarray(_checksum(arrays)))


def _items(state: State) -> dict:
  """Weights apart from the rest, so that they can be read alone."""
  return dict(weights=state["weights"], rest={k: x for k, x in state.items() if k != "weights"})


class Checkpoints:
  """The checkpoints of one run, written in the background while training goes on."""

  def __init__(self, workdir: pathlib.Path, cfg: CheckpointConfig):
    self.workdir, self.cfg = workdir, cfg
    self._manager = self._open()

  def _open(self):
    options = ocp.CheckpointManagerOptions(
      max_to_keep=self.cfg.keep,
      keep_period=self.cfg.keep_every,
      # A save that was cut off leaves a folder that does not count; it goes at the next start.
      cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager((self.workdir / FOLDER).resolve(), options=options)

  def save(self, step: int, state: State, meta: dict):
    """Begins to write; `meta` is JSON: configuration and identity of the task."""
    if step in self._manager.all_steps():
      return
    items = _items(state)
    sums = {name: checksum(arrays) for name, arrays in items.items()}
    args = {name: ocp.args.StandardSave(arrays) for name, arrays in items.items()}
    args["meta"] = ocp.args.JsonSave(meta | {"step": step, "checksums": sums})
    self._manager.save(step, args=ocp.args.Composite(**args), force=True)

  def restore(self, shapes: State, say=print) -> tuple[State, dict] | None:
    """State and meta of the newest whole checkpoint, on the devices that `shapes` names.

    A damaged one is moved aside, never deleted, and the one before it is taken; None if there is
    no checkpoint at all.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        items, meta = self._restore(step, _items(shapes))
        return dict(weights=items["weights"], **items["rest"]), meta
      except Exception as e:  # storage raises anything, and whatever it is, the data is not there
        reason = (str(e).strip() or repr(e)).splitlines()[0][:200]
      say(f"checkpoint {step} is damaged ({reason}); moved to {self._put_aside(step)}.")
    if steps:
      raise ValueError(
        f"every checkpoint in {self.workdir} was damaged and moved to {DAMAGED}/:"
        " repair one, or start in another workdir."
      )
    return None

  def restore_weights(self, shapes: dict) -> tuple[dict, dict]:
    """Weights and meta of the newest checkpoint, nothing else of it."""
    step = self._manager.latest_step()
    if step is None:
      raise ValueError(f"{self.workdir} has no checkpoint yet.")
    items, meta = self._restore(step, dict(weights=shapes))
    return items["weights"], meta

  def _restore(self, step, shapes):
    args = {name: ocp.args.StandardRestore(item) for name, item in shapes.items()}
    args["meta"] = ocp.args.JsonRestore()
    with warnings.catch_warnings():
      # Asked for on purpose: the checkpoint may come from another mesh.
      warnings.filterwarnings("ignore", message=".*[Ss]harding.*")
      restored = self._manager.restore(step, args=ocp.args.Composite(**args))
    for name in shapes:
      found, expected = checksum(restored[name]), restored.meta["checksums"][name]
      if found != expected:
        raise ValueError(f"the checksum of its {name} is {found}, expected {expected}")
    return {name: restored[name] for name in shapes}, restored.meta

  def _put_aside(self, step) -> pathlib.Path:
    target = self.workdir / DAMAGED / str(step)
    if jax.process_index() == 0:
      target.parent.mkdir(exist_ok=True)
      while target.exists():
        target = target.with_name(target.name + "+")
      (self.workdir / FOLDER / str(step)).rename(target)
    if jax.process_count() > 1:
      from jax.experimental import multihost_utils

      multihost_utils.sync_global_devices(f"damaged {step}")
    self._manager.reload()
    return target

  def wait(self):
    """Returns when everything is on disk."""
    self._manager.wait_until_finished()

  def close(self):
    self._manager.close()
