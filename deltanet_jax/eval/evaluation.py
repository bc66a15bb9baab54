"""Evaluation of a model without a trainer: compiled loss, predictions and log-probabilities.

`Evaluation` is defined by a model definition, a mesh and a batch shape. Training uses it for its
validation, `evaluate` for a model outside a run. `EvalContext` adds the weights; evaluators are
functions of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deltanet_jax import device_batches, sharding
from deltanet_jax.config import TrainConfig
from deltanet_jax.data import Batch
from deltanet_jax.models import LM
from deltanet_jax.models.abstract import (
  AbstractModel,
  abstract_model,
  check_dtype,
  put_on_mesh,
  weights_of,
)
from deltanet_jax.models.chunked_logits import (
  batch_totals,
  chunk_size,
  predictions,
  target_logprobs,
)


def lower_on_mesh(
  mesh: Mesh, function: Callable, *arguments, out_shardings=None, donate=(), **options
) -> jax.stages.Lowered:
  """Trace and lower a function for arguments of these shapes and shardings.

  Args:
    arguments: pytrees of `jax.ShapeDtypeStruct`.
    out_shardings: shardings of the results; None replicates all of them.
    donate: indices of arguments whose buffers are donated.
    options: of `jax.stages.Traced.lower`.
  """
  with jax.set_mesh(mesh):
    if out_shardings is None:
      replicated = NamedSharding(mesh, PartitionSpec())
      out_shardings = jax.tree.map(lambda _: replicated, jax.eval_shape(function, *arguments))
    jitted = jax.jit(function, out_shardings=out_shardings, donate_argnums=donate)
    return jitted.trace(*arguments).lower(**options)


class Evaluation:
  """Loss, accuracy, predictions and log-probabilities of a model for batches of one shape.

  Functions are compiled at their first call. Weights are a dictionary by name, sharded over the
  mesh like `weight_shapes`.

  Attributes:
    model: definition of the model.
    mesh: devices that compute it.
    batch: sequences per batch, of all processes together.
    length: tokens per sequence.
    max_targets: maximum number of scored targets per sequence (`data.scored`): logits are computed
      only for that many positions. None if all may be scored.
    loss_chunk: positions of a sequence whose logits are materialized at a time.
  """

  def __init__(
    self,
    model: AbstractModel,
    mesh: Mesh,
    *,
    batch: int,
    length: int,
    max_targets: int | None = None,
    loss_chunk: int = 512,
  ):
    """Initialize without compiling anything.

    Args:
      loss_chunk: upper bound; the largest divisor of the length up to it is used.

    Raises:
      ValueError: the mesh does not shard the weights, the batch or the length evenly.
    """
    model.check_mesh(mesh)
    sharding.check_divides(mesh, "batch", batch, "the batch size")
    sharding.check_divides(mesh, "length", length, "the length")
    self.model, self.mesh, self.batch, self.length = model, mesh, batch, length
    self.max_targets = max_targets
    self.loss_chunk = chunk_size(length, loss_chunk)
    self._loss_chunk_bound = loss_chunk
    self._original = self
    self._by_shape = {(batch, length): self}
    self._compiled: dict[tuple, Callable] = {}

  def at(self, *, length: int | None = None, batch: int | None = None) -> "Evaluation":
    """Return the evaluation of the same model for another batch shape; None keeps a size.

    The result is cached, with its compiled functions. `max_targets` belongs to the sequences of
    one length: another length has no limit.
    """
    original = self._original
    length, batch = length or self.length, batch or self.batch
    if (batch, length) not in original._by_shape:
      other = Evaluation(
        self.model,
        self.mesh,
        batch=batch,
        length=length,
        max_targets=original.max_targets if length == original.length else None,
        loss_chunk=original._loss_chunk_bound,
      )
      other._original = original
      original._by_shape[batch, length] = other
    return original._by_shape[batch, length]

  @functools.cached_property
  def weight_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and sharding of every weight."""
    return self.model.sharded_shapes(self.mesh)

  @functools.cached_property
  def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Global shapes `[batch, length]` and shardings of a batch."""
    return device_batches.batch_shapes(self.mesh, self.batch, self.length)

  @property
  def share(self) -> tuple[int, int]:
    """(host, hosts): the part of every batch that this process passes to `totals`."""
    return device_batches.host_share(self.batch_shapes["tokens"])

  def totals(self, weights: dict, batches: Iterable[Batch]) -> dict[str, float]:
    """Return sums over all scored targets: `loss` (nats), `correct` (argmax) and `targets`.

    Args:
      batches: this process's `share` of each batch.
    """
    sums = dict(loss=0.0, correct=0, targets=0)
    vocab = self.model.shapes["embedding"].shape[0]
    for i, batch in enumerate(batches):
      what = f"batch {i} of an evaluation"
      device_batches.check_batch(batch, self.batch_shapes, vocab=vocab, what=what)
      compiled = self._compile("totals", self._totals)
      arrays = device_batches.to_devices(batch, self.batch_shapes, self.max_targets)
      found = compiled(weights, arrays)
      sums = {name: total + found[name].item() for name, total in sums.items()}
    return sums

  def predict(self, weights: dict, batch: Batch) -> np.ndarray:
    """Return the argmax predictions `[B L]` at the scored targets, 0 elsewhere.

    Args:
      batch: the full batch, the same in every process.
    """
    most = max(int(batch["mask"].sum(axis=1).max()), 1)
    # A power of two, so that few different functions are compiled.
    most = min(1 << (most - 1).bit_length(), self.length)
    compiled = self._compile(("predict", most), functools.partial(self._predict, max_targets=most))
    return np.asarray(compiled(weights, self._own_share(batch)))

  def target_logprobs(self, weights: dict, batch: Batch) -> np.ndarray:
    """Return log p `[B L]` of every target, scored or not.

    Args:
      batch: the full batch, the same in every process.
    """
    compiled = self._compile("target_logprobs", self._target_logprobs)
    return np.asarray(compiled(weights, self._own_share(batch)))

  def _own_share(self, batch):
    own = device_batches.own_share(batch, self.batch_shapes["tokens"])
    return device_batches.to_devices(own, self.batch_shapes)

  def _compile(self, key, function):
    if key not in self._compiled:
      arguments = self.weight_shapes, self.batch_shapes
      self._compiled[key] = lower_on_mesh(self.mesh, function, *arguments).compile()
    return self._compiled[key]

  def _totals(self, weights, batch):
    model = self.model.model(weights)
    return batch_totals(model, batch, self.loss_chunk, scored=self.max_targets, count_correct=True)

  def _predict(self, weights, batch, max_targets):
    return predictions(self.model.model(weights), batch, max_targets, self.loss_chunk)

  def _target_logprobs(self, weights, batch):
    model = self.model.model(weights)
    x, _ = model.features(batch["tokens"], batch["segment_ids"])
    return target_logprobs(model, x, batch["targets"])[0]


@dataclasses.dataclass(frozen=True)
class EvalContext:
  """What an evaluator gets: the weights after `step` updates and the functions to evaluate them."""

  evaluation: Evaluation
  weights: dict
  step: int

  @property
  def model(self) -> LM:
    return self.evaluation.model.model(self.weights)

  @property
  def share(self) -> tuple[int, int]:
    """See `Evaluation.share`."""
    return self.evaluation.share

  def at(self, *, length: int | None = None, batch: int | None = None) -> "EvalContext":
    """Return the context for batches of another shape; see `Evaluation.at`."""
    return dataclasses.replace(self, evaluation=self.evaluation.at(length=length, batch=batch))

  def totals(self, batches: Iterable[Batch]) -> dict[str, float]:
    """See `Evaluation.totals`."""
    return self.evaluation.totals(self.weights, batches)

  def predict(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield each batch with its argmax predictions `[B L]`, see `Evaluation.predict`.

    Args:
      batches: full batches, `validation(0, 1)`: every process gets all predictions.
    """
    return ((batch, self.evaluation.predict(self.weights, batch)) for batch in batches)

  def target_logprobs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield each batch with log p `[B L]` of its targets; batches as in `predict`."""
    return ((batch, self.evaluation.target_logprobs(self.weights, batch)) for batch in batches)


# Yields (name, value) pairs; every process calls it.
Evaluator = Callable[[EvalContext], Iterable[tuple[str, float]]]


def run_evaluators(context: EvalContext, evaluators: Sequence[Evaluator]) -> dict[str, float]:
  """Return the metrics of all evaluators by name."""
  return {name: value for evaluator in evaluators for name, value in evaluator(context)}


def evaluate(
  model: LM, cfg: TrainConfig, evaluators: Sequence[Evaluator], step: int = 0
) -> dict[str, float]:
  """Evaluate a model outside its run; with the run's own `cfg`, bitwise as during training.

  Args:
    cfg: its model is that of `model`. mesh, data.batch, data.length, data.scored and loss_chunk
      define how batches are computed; all other fields are ignored.
  """
  for part in (cfg.model, cfg.data, cfg.mesh):
    part.validate()
  check_dtype(cfg.model)
  evaluation = Evaluation(
    abstract_model(cfg.model),
    sharding.make_mesh(cfg.mesh.sizes()),
    batch=cfg.data.batch,
    length=cfg.data.length,
    max_targets=cfg.data.scored,
    loss_chunk=cfg.loss_chunk,
  )
  weights = put_on_mesh(jax.device_get(weights_of(model)), evaluation.weight_shapes)
  return run_evaluators(EvalContext(evaluation, weights, step), evaluators)
