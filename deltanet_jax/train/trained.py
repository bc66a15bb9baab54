"""Loads what a run left, and writes its weights alone for use elsewhere."""

import dataclasses
import pathlib
import shutil

import jax
import orbax.checkpoint as ocp

from deltanet_jax.config import CheckpointConfig, TrainConfig, to_json
from deltanet_jax.files import write_json
from deltanet_jax.models import LM
from deltanet_jax.train import workdir as folders
from deltanet_jax.train.checkpoint import Checkpoints, checksum
from deltanet_jax.train.weights import skeleton, weights_of

_WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True)
class Trained:
  model: LM
  config: TrainConfig
  tokenizer: str | None  # name of what made its tokens; None if they were no text
  step: int


def load_trained(folder: str | pathlib.Path) -> Trained:
  """The newest model of a run's folder, or one that `save_weights` wrote, on one device."""
  folder = pathlib.Path(folder)
  cfg, values = folders.read_config(folder)
  model = skeleton(cfg.model)
  place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shapes = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in model.shapes.items()
  }
  if (folder / _WEIGHTS).exists():
    with ocp.StandardCheckpointer() as checkpointer:
      weights = checkpointer.restore((folder / _WEIGHTS).resolve(), shapes)
    if checksum(weights) != values["checksum"]:
      raise ValueError(f"{folder / _WEIGHTS} is damaged: its checksum is not that of {folder}.")
    step = values["step"]
  else:
    weights, meta = Checkpoints(folder, CheckpointConfig()).restore_weights(shapes)
    step = meta["step"]
  return Trained(model.model(weights), cfg, values["task"].get("tokenizer"), step)


def save_weights(trained: Trained, folder: str | pathlib.Path):
  """Writes the weights alone, by name, as a plain orbax checkpoint beside config.json."""
  folder = pathlib.Path(folder)
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f"{folder} is not empty: name a new folder.")
  new = folder.with_name(folder.name + ".new")
  shutil.rmtree(new, ignore_errors=True)
  new.mkdir(parents=True)
  weights = weights_of(trained.model)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save((new / _WEIGHTS).resolve(), weights)
  values = dict(
    version=folders.VERSION,
    config=to_json(trained.config),
    task=dict(tokenizer=trained.tokenizer),
    step=trained.step,
    checksum=checksum(weights),
  )
  write_json(new / folders.FILE, values)
  if folder.exists():
    folder.rmdir()
  new.rename(folder)
