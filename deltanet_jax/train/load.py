"""Load a trained model from a run, and export its weights."""

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
  read_arrays,
  read_weights,
)
from deltanet_jax.train.orbax_errors import silence_background_errors, silenced

_WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True)
class Trained:
  """A trained model with its configuration and provenance."""

  model: LM
  config: TrainConfig
  tokenizer: str | None  # by name; None if the task is not text
  step: int
  folder: pathlib.Path  # of the run or export, with the tokenizer's files if it has any
  history: dict  # JSON: provenance of the run, its initial weights and extensions


def load_trained(folder: str | pathlib.Path, step: int | None = None, *, report=print) -> Trained:
  """Load the model of a run or of exported weights (`save_weights`) onto one device.

  The run may be training meanwhile: loading writes nothing.

  Args:
    step: of the checkpoint; None: the newest intact one.
    report: called with one line of text if a damaged checkpoint was skipped.
  """
  folder = pathlib.Path(folder)
  cfg, values = folders.read_config(folder)
  model = abstract_model(cfg.model)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shapes = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
    for name, x in model.shapes.items()
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
  """Export the weights by name as a plain orbax checkpoint, with config.json and tokenizer."""
  weights = weights_of(trained.model)
  values = dict(
    version=folders.VERSION,
    config=to_json(trained.config),
    task=dict(tokenizer=trained.tokenizer),
    step=trained.step,
    checksum=checksum(weights),
    **trained.history,
  )
  silence_background_errors()
  with new_folder(pathlib.Path(folder)) as new:
    try:
      with silenced(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((new / _WEIGHTS).resolve(), weights)
    except Exception as e:  # orbax raises errors of any type
      reason = (str(e).strip() or repr(e)).splitlines()[0][:200]
      raise OSError(f"{folder} cannot be written ({reason}): name a writable folder.") from e
    if trained.tokenizer is not None:
      keep_tokenizer(load_tokenizer(trained.tokenizer, trained.folder), new)
    write_json(new / folders.FILE, values)
