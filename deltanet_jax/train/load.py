"""Loads what a run left, and writes its weights alone for use elsewhere."""

import dataclasses
import pathlib

import jax
import orbax.checkpoint as ocp

from deltanet_jax.config import TrainConfig, to_json
from deltanet_jax.data import keep_tokenizer, load_tokenizer
from deltanet_jax.files import new_folder, write_json
from deltanet_jax.models import LM
from deltanet_jax.models.abstract import abstract_model, weights_of
from deltanet_jax.train import workdir as folders
from deltanet_jax.train.checkpoint_reader import (
  DamageError,
  check_sum,
  checksum,
  quiet,
  raise_only,
  read_arrays,
  read_weights,
)

_WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True)
class Trained:
  model: LM
  config: TrainConfig
  tokenizer: str | None  # name of what made its tokens; None if they were no text
  step: int
  folder: pathlib.Path  # where it was found, with the files of its tokenizer if it has any
  history: dict  # JSON: provenance of the run, the weights it began with, how it was extended


def load_trained(folder: str | pathlib.Path, step: int | None = None, *, report=print) -> Trained:
  """A model of a run's folder, or one that `save_weights` wrote, on one device.

  The run may be training meanwhile: reading changes nothing in its folder.

  Args:
    step: of the checkpoint; None takes the newest that is whole.
    report: called with one line of text, if a damaged checkpoint was passed over.
  """
  folder = pathlib.Path(folder)
  cfg, values = folders.read_config(folder)
  model = abstract_model(cfg.model)
  place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shapes = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in model.shapes.items()
  }
  if "checksum" in values:
    weights, found = _exported(folder, values, shapes), values["step"]
    if step not in (None, found):
      raise ValueError(f"{folder} holds the weights of step {found}, not of step {step}.")
  else:
    weights, meta = read_weights(folder, shapes, step, report)
    found = meta["step"]
  tokenizer = values["task"].get("tokenizer")
  history = folders.history(values)
  return Trained(model.model(weights), cfg, tokenizer, found, folder, history)


def _exported(folder, values, shapes):
  try:
    weights = read_arrays(folder / _WEIGHTS, shapes)
    check_sum(_WEIGHTS, weights, values["checksum"])
  except DamageError as e:
    raise ValueError(f"{folder / _WEIGHTS} is damaged ({e}): export it again.") from None
  return weights


def save_weights(trained: Trained, folder: str | pathlib.Path):
  """Writes the weights alone, by name, as a plain orbax checkpoint beside config.json."""
  weights = weights_of(trained.model)
  values = dict(
    version=folders.VERSION,
    config=to_json(trained.config),
    task=dict(tokenizer=trained.tokenizer),
    step=trained.step,
    checksum=checksum(weights),
    **trained.history,
  )
  raise_only()
  with new_folder(pathlib.Path(folder)) as new:
    try:
      with quiet(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((new / _WEIGHTS).resolve(), weights)
    except Exception as e:  # storage raises anything
      reason = (str(e).strip() or repr(e)).splitlines()[0][:200]
      raise OSError(f"{folder} cannot be written ({reason}): name a folder that can.") from e
    if trained.tokenizer is not None:
      keep_tokenizer(load_tokenizer(trained.tokenizer, trained.folder), new)
    write_json(new / folders.FILE, values)
