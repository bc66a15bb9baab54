"""The learning rate schedule of the paper."""

import numpy as np
import pytest

from deltanet_jax.train.optim import learning_rate
from experiments.configs import lm


@pytest.mark.parametrize("size,warmup,total", [("340m", 0.5e9, 15e9), ("1.3b", 1e9, 100e9)])
def test_schedule(size, warmup, total):
  cfg = lm.get_config(f"deltanet-{size}")
  per_step = cfg.data.batch * cfg.data.length
  assert per_step == {"340m": 2**19, "1.3b": 2**21}[size]
  at = lambda tokens: float(learning_rate(cfg, tokens / per_step))
  middle = (warmup + total) / 2
  for tokens, expected in {
    0: 3e-5,
    warmup / 2: 1.65e-4,
    warmup: 3e-4,
    middle: 1.65e-4,
    total: 3e-5,
    2 * total: 3e-5,
  }.items():
    np.testing.assert_allclose(at(tokens), expected, rtol=1e-4)
  assert cfg.optimizer.weight_decay == 0.01 and cfg.optimizer.clip == 1.0
  assert cfg.steps == total // per_step
