"""Our models in lm-evaluation-harness (extra `eval`): its tasks by name, from the hub or files.

`HarnessLM` is a model as the harness wants it, `run` evaluates one on tasks of the paper.
"""

from deltanet_jax.eval.harness.model import HarnessLM
from deltanet_jax.eval.harness.run import Result, run
from deltanet_jax.eval.harness.scoring import ContinuationScorer, Score
from deltanet_jax.eval.harness.tasks import TASKS, resolve

__all__ = ["TASKS", "ContinuationScorer", "HarnessLM", "Result", "Score", "resolve", "run"]

Scorer = ContinuationScorer  # its name before version 0.2
