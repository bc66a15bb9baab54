"""Rows of the paper's language-model tables: sizes, budgets, learning rates, cost and results."""

import importlib
import re
import statistics

import pytest

from deltanet_jax.models import summarize
from deltanet_jax.train.optim import learning_rate
from experiments.configs import lm, lm_3b, lm_340m, lm_ablations
from experiments.lib import config_file, paper_tables

ROWS = [
  (file, row)
  for file in paper_tables.FILES
  for row in importlib.import_module(f"experiments.configs.{file}").PAPER
]
# Rounded sizes of the paper; exact counts are in tests/models/test_presets.py.
PARAMETERS = {"340m": (0.36e9, 0.39e9), "1.3b": (1.3e9, 1.41e9), "3b": (2.9e9, 3.1e9)}
TOKENS = {"340m": 15_000_000_000, "1.3b": 100_000_000_000, "3b": 1_000_000_000_000}
BATCH = {"340m": 524_288, "1.3b": 2_097_152, "3b": 2_097_152}
STATE = {"retnet": 512, "mamba": 64}
_sizes = {}


def sizes(cfg):
  """Summary of a model, cached."""
  key = hash(cfg.model)
  _sizes[key] = _sizes.get(key) or summarize(cfg.model, 2048)
  return _sizes[key]


@pytest.mark.parametrize("file,row", ROWS)
def test_a_row_has_the_settings_of_the_paper(file, row):
  module = importlib.import_module(f"experiments.configs.{file}")
  cfg = config_file.load(f"experiments/configs/{file}.py:{row}")
  cfg.validate()
  size, found = module.SIZE, sizes(cfg)
  low, high = PARAMETERS[size]
  assert low < found.parameters < high
  per_update = cfg.data.batch * cfg.data.length
  assert (cfg.data.length, per_update) == (2048, BATCH[size])
  assert 0 <= TOKENS[size] - cfg.steps * per_update < per_update and cfg.tokens == TOKENS[size]
  opt = cfg.optimizer
  assert (opt.weight_decay, opt.clip) == (0.01, 1.0)
  for mixer in cfg.model.mixers.values():
    if mixer.kind == "deltanet":
      assert mixer.key_size == mixer.value_size == 128 and mixer.conv == 4 * ("noconv" not in row)
  if row.endswith(("sliding", "global")) or row == "transformer":
    assert found.state_expansion is None
  else:
    wide = 256 if row.startswith("gla") and size == "1.3b" else 128
    assert found.state_expansion == STATE.get(row, wide)


@pytest.mark.parametrize(
  "name,warmup", [("deltanet-340m", 500e6 / 2**19), ("deltanet-1.3b", 1e9 / 2**21)]
)
def test_the_learning_rate_schedule(name, warmup):
  cfg = lm.get_config(name)
  rate = lambda step: float(learning_rate(cfg, step))
  last = cfg.tokens / (cfg.data.batch * cfg.data.length)
  middle = (warmup + last) / 2
  assert rate(0) == pytest.approx(3e-5, rel=1e-6)
  assert rate(round(warmup / 2)) == pytest.approx(1.65e-4, rel=2e-3)
  assert rate(round(warmup) + 1) == pytest.approx(3e-4, rel=1e-3)
  assert rate(round(middle)) == pytest.approx(1.65e-4, rel=1e-3)
  assert rate(cfg.steps - 1) == pytest.approx(3e-5, rel=1e-3)


def test_ablations_change_two_fields():
  for row in lm_ablations.PAPER:
    mixer = lm_ablations.get_config(row).model.mixers["deltanet"]
    assert f"{mixer.norm}-{mixer.activation}" == row
  assert lm_ablations.get_config("l2-silu") == lm_340m.get_config("deltanet")
  with pytest.raises(ValueError, match=r"the row is 'l2-gelu' \(nearest: l2-"):
    lm_ablations.get_config("l2-gelu")


@pytest.mark.parametrize("file", ["lm_340m", "lm_1_3b"])
def test_the_table_in_the_docstring_is_correct(file):
  """Parameters, state and cost are computed; results are those of PAPER."""
  module = importlib.import_module(f"experiments.configs.{file}")
  documented = [
    re.split(r"\s*\|\s*", x)[1:-1] for x in module.__doc__.splitlines() if x[:1] == "|"
  ][2:]
  assert [cells[0] for cells in documented] == list(module.PAPER)
  for row, parameters, state, flops, hours, wiki, lambada, average, swde in documented:
    cfg = module.get_config(row)
    found = sizes(cfg)
    cost = 3 * cfg.tokens * found.flops
    assert parameters == f"{found.parameters / 1e6:.1f}M"
    assert state == ("–" if found.state_expansion is None else f"{found.state_expansion:.0f}")
    assert flops == f"{cost:.1e}" and hours == f"{cost / (0.4 * 989.4e12) / 3600:.0f}"
    metrics = list(module.PAPER[row].values())
    assert (wiki, lambada) == (f"{metrics[0]:.2f}", f"{metrics[1]:.1f}")
    # The paper averages the six accuracies before the recall tasks.
    assert float(average) == pytest.approx(statistics.fmean(metrics[2:8]), abs=0.16)
    assert float(swde) == metrics[8]


def test_rows_by_name():
  rows = paper_tables.paper_rows()
  assert len(rows) == 9 + 8 + 4 + 1
  assert paper_tables.paper_value("piqa", "acc", rows["deltanet-340m"]) == 64.8
  assert paper_tables.paper_value("arc_easy", "acc_norm", rows["deltanet-3b"]) == 60.4
  assert paper_tables.paper_value("boolq", "acc", rows["deltanet-3b"]) is None
  assert len(lm_3b.OTHERS) == 5
