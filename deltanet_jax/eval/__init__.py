"""Evaluators, from a model to named numbers, and what models are compared with."""

from deltanet_jax.eval.accuracy import Accuracy, DfaAccuracy
from deltanet_jax.eval.accuracy_by_length import AccuracyByLength
from deltanet_jax.eval.evaluate import evaluate
from deltanet_jax.eval.loss_by_position import LossByPosition
from deltanet_jax.eval.ngram import bits_per_byte
from deltanet_jax.eval.planted_recall import PlantedRecall
from deltanet_jax.eval.validation import Validation

__all__ = [
  "Accuracy",
  "AccuracyByLength",
  "DfaAccuracy",
  "LossByPosition",
  "PlantedRecall",
  "Validation",
  "bits_per_byte",
  "evaluate",
]

Recall = PlantedRecall  # its name before version 0.2
