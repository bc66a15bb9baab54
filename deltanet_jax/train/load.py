"""Load a trained model from a run, and export its weights."""

import dataclasses
import pathlib

import jax
import orbax.checkpoint as ocp

from deltanet_jax.config import TrainConfig, to_json
from deltanet_jax.data import keep_tokenizer, load_tokenizer, vocabulary_mismatch
from deltanet_jax.files import as_path, new_folder, write_json
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
  folder = as_path(folder)
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


def save_weights(
  trained: Trained | LM, folder: str | pathlib.Path, *, tokenizer: str | pathlib.Path | None = None
):
  """Write weights, by name, as a plain orbax checkpoint with a config.json; see `load_trained`.

  Args:
    trained: a run's model from `load_trained`, or any model, for instance of `build` or `load_fla`.
    folder: new or empty.
    tokenizer: of a model, its tokenizer as named for `load_tokenizer`, copied into the folder;
      None if the tokens are not text. A `Trained` has its own.
  """
  if isinstance(trained, Trained):
    if tokenizer is not None:
      raise ValueError("tokenizer is set, but a Trained has its own: leave it out.")
    name, path, history = trained.tokenizer, trained.folder, trained.history
  else:
    trained = _untrained(trained)
    name, path, history = tokenizer, "", folders.history({})
  stored = None if name is None else load_tokenizer(name, path)
  odd = stored and vocabulary_mismatch(stored.vocab, trained.config.model.vocab)
  if odd and tokenizer is not None:
    raise ValueError(f"{odd}: {tokenizer} is not the tokenizer of this model.")
  weights = weights_of(trained.model)
  values = dict(
    version=folders.VERSION,
    config=to_json(trained.config),
    mixers=folders.mixer_paths(trained.config),
    task=dict(tokenizer=stored and stored.name),
    step=trained.step,
    checksum=checksum(weights),
    **history,
  )
  silence_background_errors()
  with new_folder(as_path(folder), last=folders.FILE) as new:
    try:
      with silenced(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((new / _WEIGHTS).resolve(), weights)
    except Exception as e:  # orbax raises errors of any type
      reason = (str(e).strip() or repr(e)).splitlines()[0][:200]
      raise OSError(f"{folder} cannot be written ({reason}): name a writable folder.") from e
    if stored is not None:
      keep_tokenizer(stored, new)
    write_json(new / folders.FILE, values)


def _untrained(model: LM) -> Trained:
  """A model that no run trained, at step 0 of a default configuration.

  Raises:
    ValueError: its weights are not those that its configuration builds, so that `load_trained`
      could not rebuild it.
  """
  if not isinstance(model, LM):
    raise ValueError(f"save_weights takes a model of build() or a Trained, got {type(model)}.")
  expected = {name: (x.shape, x.dtype) for name, x in abstract_model(model.cfg).shapes.items()}
  found = {name: (x.shape, x.dtype) for name, x in weights_of(model).items()}
  if odd := sorted(name for name, _ in expected.items() ^ found.items()):
    raise ValueError(
      f"weight {odd[0]} differs from what the model's configuration builds: save_weights stores the"
      " configuration and the weights, not changes to the modules."
    )
  config = TrainConfig(model=model.cfg)
  return Trained(model, config, None, 0, pathlib.Path(), {})
