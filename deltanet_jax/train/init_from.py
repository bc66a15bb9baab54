"""Initial weights of a run: from another run, exported weights or a public checkpoint."""

import dataclasses
import hashlib
import pathlib

import jax
import numpy as np

from deltanet_jax.config import ModelConfig
from deltanet_jax.data import load_tokenizer
from deltanet_jax.data.corpus.tokenizer import find_tokenizers
from deltanet_jax.files import as_path
from deltanet_jax.interop import load_fla
from deltanet_jax.models.abstract import digest, weights_of
from deltanet_jax.train import workdir as folders
from deltanet_jax.train.load import Trained, load_trained
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
  """Initial weights from a folder, loaded lazily: a run that resumes does not need them.

  Args:
    path: of a run, of exported weights, or of a public checkpoint (see `load_fla`).
    step: of a run's checkpoint; None: the newest intact one.
    allow_other_tokenizer: start also if the weights were trained with another tokenizer than the
      task's.
    report: called with one line of text if a damaged checkpoint was skipped.
  """

  def __init__(
    self,
    path: str | pathlib.Path,
    step: int | None = None,
    *,
    allow_other_tokenizer: bool = False,
    report=print,
  ):
    folder = as_path(path)
    self.path = str(folder.resolve() if folder.exists() else path)
    self._step, self._report = step, report
    self._any_tokenizer = allow_other_tokenizer
    self._loaded = None

  def check(self, cfg: ModelConfig, shapes: dict[str, jax.ShapeDtypeStruct]):
    """Raise ValueError for weights of another model, naming the first field that differs.

    Args:
      shapes: of the weights of `cfg`.
    """
    model, weights, *_ = self._content()
    if found := _difference(model, cfg) or _shape_difference(weights, shapes):
      name, theirs, ours = found
      raise ValueError(
        f"{self.path} holds a model with {name} = {theirs!r}, the configuration has {ours!r}: use"
        " the model of these weights, or other weights."
      )

  def check_tokenizer(self, name: str | None, hash: str | None):
    """Raise ValueError if the weights were trained with another tokenizer.

    Weights or tasks whose tokenizer is unknown are accepted.

    Args:
      name: of the task's tokenizer; None if the task is not text.
      hash: of its definition, as `Tokenizer.hash`.
    """
    if self._any_tokenizer or hash is None:
      return
    theirs, hashes = self._content()[3]
    if hashes and hash not in hashes:
      raise ValueError(
        f"{self.path} was trained with the tokenizer {theirs!r} ({hashes[0][:12]}), the corpus has"
        f" {name!r} ({hash[:12]}), so its token ids mean other text: prepare the corpus with"
        " --tokenizer of these weights, or set --allow_other_tokenizer."
      )

  def origin(self) -> dict:
    """Return JSON for config.json: path, kind, step, sha256 of the weights and commit if known."""
    return self._content()[2]

  def take(self) -> dict[str, np.ndarray]:
    """Return the weights in host memory and release them here."""
    weights = self._content()[1]
    self._loaded = None
    return weights

  def _content(self):
    if self._loaded is None:
      content = problem = None
      try:
        content = self._load()
      except Exception as e:
        problem = e
      raise_together(problem, self.path)
      # A training run in progress may have saved a checkpoint between the reads of two processes.
      if not same_everywhere(int(content[2]["sha256"][:7], 16)):
        raise ValueError(
          f"processes read different weights from {self.path}: name a checkpoint with --init_step."
        )
      self._loaded = content
    return self._loaded

  def _load(self):
    facts = dict(path=self.path)
    if folders.is_ours(self.path):
      trained = load_trained(self.path, self._step, report=self._report)
      model, history = trained.model, trained.history
      tokenizer = _own_tokenizer(trained)
      kind = "run" if folders.is_run(self.path) else "export"
      facts |= dict(kind=kind, step=trained.step, commit=history["origin"].get("commit"))
    elif self._step is not None:
      raise ValueError(
        f"{self.path} is not a run: it has no checkpoints by step, leave --init_step out."
      )
    else:
      model = load_fla(self.path)
      tokenizer = _public_tokenizer(self.path)
      facts |= dict(kind="public")
    weights = jax.device_get(weights_of(model))
    return model.cfg, weights, facts | dict(sha256=digest(weights)), tokenizer


def _own_tokenizer(trained: Trained) -> tuple[str | None, list[str]]:
  """Return name and hash of the tokenizer of a run or an export; no hash if it has none."""
  name, (_, values) = trained.tokenizer, folders.read_config(trained.folder)
  if name is None:
    return None, []
  stored = values.get("identity", {}).get("tokenizer")  # an export has none
  return name, [stored or load_tokenizer(name, trained.folder).hash]


def _public_tokenizer(folder: str) -> tuple[str | None, list[str]]:
  """Return name and hashes of the tokenizer files of a local checkpoint; none if it has none.

  A folder may hold the same tokenizer in two formats.
  """
  files = find_tokenizers(folder)
  # As `Tokenizer.hash`, without the packages that read these files.
  hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
  return (files[0].name if files else None), hashes


def _difference(theirs: ModelConfig, ours: ModelConfig) -> tuple | None:
  """Return name and values of the first field that changes what the weights compute."""
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
  return None


def _shape_difference(weights, shapes) -> tuple | None:
  """Return name, shapes and dtypes of the first weight that differs."""
  theirs, ours = (
    {name: (x.shape, x.dtype.name) for name, x in arrays.items()} for arrays in (weights, shapes)
  )
  for name in sorted(theirs.keys() | ours.keys()):
    if theirs.get(name) != ours.get(name):
      return f"weight {name}", theirs.get(name), ours.get(name)
  return None
