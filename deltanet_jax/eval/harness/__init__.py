"""Evaluate models with lm-evaluation-harness (extra `eval`), on Hugging Face Hub or local data.

`HarnessLM` wraps a model for the harness; `run` evaluates it on the tasks of the paper.
"""

from deltanet_jax.eval.harness.model import HarnessLM
from deltanet_jax.eval.harness.run import Result, run
from deltanet_jax.eval.harness.scoring import ContinuationScorer, Score
from deltanet_jax.eval.harness.tasks import TASKS, resolve

__all__ = ["TASKS", "ContinuationScorer", "HarnessLM", "Result", "Score", "resolve", "run"]

Scorer = ContinuationScorer  # its name before version 0.2
