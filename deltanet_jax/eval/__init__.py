"""Evaluation: `evaluate` a model with evaluators, and n-gram baselines to compare it with."""

from deltanet_jax.eval.accuracy import Accuracy, AccuracyByLength, DfaAccuracy
from deltanet_jax.eval.evaluation import (
  EvalContext,
  Evaluation,
  Evaluator,
  evaluate,
  run_evaluators,
)
from deltanet_jax.eval.loss_by_position import LossByPosition
from deltanet_jax.eval.ngram import bits_per_byte
from deltanet_jax.eval.planted_recall import PlantedRecall
from deltanet_jax.eval.validation import Validation

__all__ = [
  "Accuracy",
  "AccuracyByLength",
  "DfaAccuracy",
  "EvalContext",
  "Evaluation",
  "Evaluator",
  "LossByPosition",
  "PlantedRecall",
  "Validation",
  "bits_per_byte",
  "evaluate",
  "run_evaluators",
]

Recall = PlantedRecall  # its name before version 0.2
