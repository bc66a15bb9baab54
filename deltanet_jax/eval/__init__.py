"""Evaluators, from a model to named numbers, and what models are compared with."""

from deltanet_jax.eval.accuracy import Accuracy, DfaAccuracy
from deltanet_jax.eval.evaluate import evaluate
from deltanet_jax.eval.lengths import AccuracyByLength
from deltanet_jax.eval.ngram import bits_per_byte
from deltanet_jax.eval.positions import LossByPosition
from deltanet_jax.eval.recall import Recall
from deltanet_jax.eval.validation import Validation

__all__ = [
  "Accuracy",
  "AccuracyByLength",
  "DfaAccuracy",
  "LossByPosition",
  "Recall",
  "Validation",
  "bits_per_byte",
  "evaluate",
]
