"""State-tracking runs: parity is learned, accuracy by length, run names."""

import pytest

from deltanet_jax.data import StateTracking, ValidationSource
from deltanet_jax.eval import AccuracyByLength
from experiments.configs import state_tracking
from tests.support.training import silent


class WrongBeforeTheLast(ValidationSource):
  """Parity with every target flipped except the last of a sequence."""

  def __init__(self, length):
    self._task = StateTracking("parity", length=length, batch=64, validation_batches=1)

  def validation(self, host, hosts):
    for batch in self._task.validation(host, hosts):
      batch["targets"][:, :-1] ^= 1
      yield batch


@pytest.mark.slow
def test_negative_eigenvalues_learn_parity_at_four_times_the_length(tmp_path):
  cfg = state_tracking.get_config("parity-deltanet-negative")
  cfg.data.length = cfg.loss_chunk = 8
  cfg.tokens, cfg.optimizer.warmup_tokens = 80 * 64 * 8, 20 * 64 * 8
  task = StateTracking("parity", length=8, batch=64)
  tests = {32: StateTracking("parity", length=32, batch=64), 4: WrongBeforeTheLast(4)}
  results = silent(cfg, tmp_path, task, evaluators=[AccuracyByLength(tests)])
  assert results["accuracy_last_32"] > 0.99 and results["accuracy_all_32"] > 0.99
  # Only the last position is correct.
  assert results["accuracy_last_4"] == 1.0 and results["accuracy_all_4"] == 0.25


def test_run_names():
  assert len(state_tracking.RUNS) == 10
  with pytest.raises(ValueError, match=r"the run is 's3-delta'.*expected one of"):
    state_tracking.get_config("s3-delta")
  for name in state_tracking.RUNS:
    state_tracking.get_config(name).validate()
