"""Checkpoints that are whole or not there: state, data position, configuration, checksum."""

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
def _checksum(state: State):
  """Sum of all bits, as numbers modulo 2^32: exact in any order, so on any mesh."""
  bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32).sum(dtype=jnp.uint32)
  return sum(jax.tree.leaves(jax.tree.map(bits, state)), start=jnp.zeros((), jnp.uint32))


def checksum(state: State) -> int:
  return int(np.asarray(_checksum(state)))


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
    """Begins to write; `meta` is JSON: configuration, data position, tokenizer."""
    if step in self._manager.all_steps():
      return
    meta = meta | {"step": step, "checksum": checksum(state)}
    args = dict(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
    self._manager.save(step, args=ocp.args.Composite(**args), force=True)

  def restore(self, shapes: State, say=print) -> tuple[State, dict] | None:
    """State and meta of the newest whole checkpoint, on the devices that `shapes` names.

    A damaged one is moved aside, never deleted, and the one before it is taken; None if there is
    no checkpoint at all.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        return self._restore(step, shapes)
      except Exception as e:  # storage raises anything, and whatever it is, the data is not there
        reason = (str(e).strip() or repr(e)).splitlines()[0][:200]
      say(f"checkpoint {step} is damaged ({reason}); moved to {self._put_aside(step)}.")
    if steps:
      raise ValueError(
        f"every checkpoint in {self.workdir} was damaged and moved to {DAMAGED}/:"
        " repair one, or start in another workdir."
      )
    return None

  def _restore(self, step, shapes):
    args = dict(state=ocp.args.StandardRestore(shapes), meta=ocp.args.JsonRestore())
    with warnings.catch_warnings():
      # Asked for on purpose: the checkpoint may come from another mesh.
      warnings.filterwarnings("ignore", message=".*[Ss]harding.*")
      restored = self._manager.restore(step, args=ocp.args.Composite(**args))
    found, expected = checksum(restored.state), restored.meta["checksum"]
    if found != expected:
      raise ValueError(f"its checksum is {found}, expected {expected}")
    return restored.state, restored.meta

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
