"""Loss against the position in the context, for contexts longer than those of training."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from deltanet_jax import device_batches
from deltanet_jax.data import Batch, ValidationSource
from deltanet_jax.models.chunked_logits import target_logprobs
from deltanet_jax.train.eval_context import EvalContext
from deltanet_jax.train.step import Trainer, make_trainer

_FIRST = 16  # positions of the first bin; each next one ends at twice the position


def edges(length: int) -> list[int]:
  """Where bins of positions begin, and the length itself."""
  found = [0, _FIRST]
  while found[-1] < length:
    found.append(min(2 * found[-1], length))
  return found if found[-1] == length else [0, length]


def positions(segment_ids: np.ndarray) -> np.ndarray:
  """`[b L]`: tokens before each one in its row and document."""
  place = np.broadcast_to(np.arange(segment_ids.shape[1]), segment_ids.shape)
  new = np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
  return place - np.maximum.accumulate(np.where(new, place, 0), axis=1)


class LossByPosition:
  """An evaluator of held-out rows of several lengths, each with batches of its own.

  Yields, in nats per token, `loss_2048` over all targets of rows of 2048 tokens, and
  `loss_2048_from_512` over those of which 512 tokens to twice as many came before, in the row and
  the document.
  """

  def __init__(self, texts: Mapping[int, tuple[ValidationSource, int]], batches: int | None = None):
    """Args:
    texts: by length, what is read and how many rows its batches have.
    batches: only the first so many of each.
    """
    self._texts, self._batches = texts, batches
    self._programs: dict[int, tuple] = {}

  def _program(self, evaluated: EvalContext, length: int, rows: int):
    """(the trainer of this shape, its compiled losses)."""
    if length not in self._programs:
      trainer = _reshaped(evaluated.scorer.trainer, length, rows)

      def losses(weights, batch):
        model = trainer.abstract_model.model(weights)
        x, _ = model.features(batch["tokens"], batch["segment_ids"])
        return -target_logprobs(model, x, batch["targets"])[0]

      shapes = trainer.state_shapes()["weights"], trainer.batch_shapes()
      self._programs[length] = trainer, trainer.lower(losses, *shapes).compile()
    return self._programs[length]

  def __call__(self, evaluated: EvalContext) -> Iterator[tuple[str, float]]:
    for length, (text, rows) in self._texts.items():
      bins = edges(length)
      sums, counts = np.zeros((2, len(bins) - 1))
      trainer, program = self._program(evaluated, length, rows)
      shapes = trainer.batch_shapes()
      # Every process reads all rows, and so knows where each loss belongs.
      for batch in itertools.islice(text.validation(0, 1), self._batches):
        loss = np.asarray(
          program(evaluated.weights, device_batches.to_devices(_own(batch, shapes), shapes))
        )
        place = positions(batch["segment_ids"])[batch["mask"]]
        sums += np.histogram(place, bins, weights=loss[batch["mask"]].astype(np.float64))[0]
        counts += np.histogram(place, bins)[0]
      yield f"loss_{length}", float(sums.sum() / counts.sum())
      for first, total, count in zip(bins, sums, counts):
        if count:
          yield f"loss_{length}_from_{first}", float(total / count)


def _own(batch: Batch, shapes) -> Batch:
  """The rows of this process."""
  host, hosts = device_batches.host_share(shapes["tokens"])
  rows = len(batch["mask"]) // hosts
  return {name: x[host * rows : (host + 1) * rows] for name, x in batch.items()}


def _reshaped(trainer: Trainer, length: int, rows: int) -> Trainer:
  data = dataclasses.replace(trainer.cfg.data, length=length, batch=rows, scored=None)
  cfg = dataclasses.replace(trainer.cfg, data=data, loss_chunk=length, grad_accum=1)
  cfg.tokens = max(cfg.tokens, rows * length)
  return make_trainer(cfg, list(trainer.mesh.devices.flat))
