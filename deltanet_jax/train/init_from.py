"""Weights that a run begins with instead of random ones: a run's, an export's or public ones."""

import dataclasses
import pathlib

import jax
import numpy as np

from deltanet_jax.config import ModelConfig
from deltanet_jax.interop import load_fla
from deltanet_jax.models.abstract import abstract_model, digest, weights_of
from deltanet_jax.train import workdir as folders
from deltanet_jax.train.load import load_trained
from deltanet_jax.train.multihost import raise_together, same_everywhere

# Mixer settings that do not change what the weights compute.
_MIXER_IGNORED = ("chunk", "implementation")
# None means "derived from other sizes": the shapes of the weights decide whether two are the same.
_MIXER_SIZES = ("heads", "kv_heads", "dt_rank")
# Model settings that do not change what the weights compute: initialization, precision, memory,
# and dropout, which is off in evaluation.
_MODEL_IGNORED = (
  "init_std",
  "output_init",
  "conv_std",
  "dtype",
  "remat",
  "scan",
  "embedding_dropout",
)
# Compared in another way: the mixer of each layer, and the MLP by its inner width.
_MODEL_DERIVED = ("mixers", "pattern", "mlp_ratio", "mlp_multiple", "mlp_inner")


class InitFrom:
  """The weights of a folder, read when they are first needed: a run that goes on needs them not.

  Args:
    path: of a run, of exported weights, or of a public checkpoint as `load_fla` takes it.
    step: of a run's checkpoint; None takes the newest that is whole.
    report: called with one line of text, if a damaged checkpoint was passed over.
  """

  def __init__(self, path: str | pathlib.Path, step: int | None = None, *, report=print):
    folder = pathlib.Path(path)
    self.path = str(folder.resolve() if folder.exists() else path)
    self._step, self._say = step, report
    self._read = None

  def check(self, cfg: ModelConfig):
    """Refuses weights of another model, naming the first field that differs."""
    model, _, _ = self._content()
    if found := _difference(model, cfg):
      name, theirs, ours = found
      raise ValueError(
        f"{self.path} holds a model with {name} = {theirs!r}, the configuration has {ours!r}: give"
        " the run the model of its weights, or other weights."
      )

  def origin(self) -> dict:
    """JSON for config.json: path, kind, step, sha256 of the weights and commit where known."""
    return self._content()[2]

  def take(self) -> dict[str, np.ndarray]:
    """The weights in the host's memory, and no longer here."""
    weights = self._content()[1]
    self._read = None
    return weights

  def _content(self):
    if self._read is None:
      content = problem = None
      try:
        content = self._load()
      except Exception as e:
        problem = e
      raise_together(problem, self.path)
      # A run that trains meanwhile may have saved anew for some.
      if not same_everywhere(int(content[2]["sha256"][:7], 16)):
        raise ValueError(f"processes read different weights from {self.path}: name a step of it.")
      self._read = content
    return self._read

  def _load(self):
    facts = dict(path=self.path)
    if folders.is_ours(self.path):
      trained = load_trained(self.path, self._step, report=self._say)
      model, history = trained.model, trained.history
      kind = "run" if folders.is_run(self.path) else "export"
      facts |= dict(kind=kind, step=trained.step, commit=history["origin"].get("commit"))
    elif self._step is not None:
      raise ValueError(f"{self.path} is no run: it has no steps to choose from.")
    else:
      model = load_fla(self.path)
      facts |= dict(kind="public")
    weights = jax.device_get(weights_of(model))
    return model.cfg, weights, facts | dict(sha256=digest(weights))


def _difference(theirs: ModelConfig, ours: ModelConfig) -> tuple | None:
  """Return name and values of the first field by which two models compute something else."""
  same = lambda get: get(theirs) == get(ours)
  for field in dataclasses.fields(ModelConfig):
    name = field.name
    if name in _MODEL_IGNORED or name in _MODEL_DERIVED:
      continue
    if not same(lambda cfg: getattr(cfg, name)):
      return f"model.{name}", getattr(theirs, name), getattr(ours, name)
  if not same(lambda cfg: cfg.mlp_width):
    return "model.mlp_inner", theirs.mlp_width, ours.mlp_width
  kinds = lambda cfg: [cfg.mixers[name].kind for name in cfg.layers]
  if not same(kinds):
    return "model.pattern", kinds(theirs), kinds(ours)
  for their_name, our_name in dict.fromkeys(zip(theirs.layers, ours.layers)):
    a, b = theirs.mixers[their_name], ours.mixers[our_name]
    for field in dataclasses.fields(a):
      pair = getattr(a, field.name), getattr(b, field.name)
      by_shapes = None in pair and field.name in _MIXER_SIZES
      if pair[0] != pair[1] and field.name not in _MIXER_IGNORED and not by_shapes:
        return f"model.mixers.{our_name}.{field.name}", *pair
  shapes = [
    {name: (x.shape, x.dtype.name) for name, x in abstract_model(cfg).shapes.items()}
    for cfg in (theirs, ours)
  ]
  for name in shapes[0].keys() | shapes[1].keys():
    if shapes[0].get(name) != shapes[1].get(name):
      return f"weight {name}", shapes[0].get(name), shapes[1].get(name)
  return None
