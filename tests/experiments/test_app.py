"""Start of commands: `--help` lists all flags, errors are one line."""

import functools
import importlib.util
import re
import subprocess
import sys

import pytest

from experiments.lib import provenance

COMMANDS = {
  "experiments.generate": ("--text", "--temperature", "--top_k", "--tokenizer"),
  "experiments.evaluate": ("--workdir", "--checkpoint", "--corpus", "--input", "--step"),
  "experiments.prepare_data": ("--input", "--validation", "--validation_input", "--[no]eos"),
  "experiments.train": (
    "--config",
    "--workdir",
    "--init_from",
    "--config.optimizer.learning_rate=0.0003",
  ),
  "experiments.state_tracking": ("--run", "--seed", "--length", "--[no]again"),
  "experiments.bench.kernel_speed": ("--curve", "--results", "--[no]allow_modified"),
  "experiments.bench.decode_speed": ("--context", "--[no]again"),
  "experiments.bench.ensemble_speed": ("--family", "--members", "--rounds"),
  "experiments.bench.mixer_speed": ("--kind", "--width", "--rounds"),
  "experiments.bench.throughput": ("--model", "--length", "--tokens"),
  "experiments.bench.data_speed": ("--corpus", "--[no]again"),
  "experiments.bench.compare_transformers": ("--reference_python", "--layer", "--[no]again"),
  "experiments.aot.kernel_report": ("--target", "--[no]again"),
  "experiments.aot.kernel_errors": ("--results",),
  "experiments.aot.layer_report": ("--preset", "--results"),
  "experiments.aot.train_step_report": ("--config", "--target", "--[no]allow_modified"),
  "experiments.aot.throughput_bound": ("--model", "--target", "--length"),
  "experiments.plots": ("--results",),
}


def start(*words):
  command = [sys.executable, "-m", *words]
  return subprocess.run(command, cwd=provenance.CHECKOUT, capture_output=True, text=True)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# With config fields, and with flags of imported modules; `make test-slow` has the others.
_FAST = ("experiments.train", "experiments.state_tracking")


@pytest.mark.parametrize("module", [x if x in _FAST else slow(x) for x in COMMANDS])
def test_help_shows_all_flags(module):
  shown = start(module, "--help").stdout
  assert f"python -m {module}" in shown
  for flag in COMMANDS[module]:
    assert f"\n  {flag}:" in shown or f"\n  {flag} " in shown, shown


@pytest.mark.parametrize(
  "words, expected",
  [
    (["experiments.plots", "figure.png"], "plots: unexpected argument 'figure.png'; see --help"),
    slow(
      ["experiments.bench.compare_transformers", "--allow_modified"],
      "compare_transformers: --reference_python is needed; see --help",
    ),
    slow(
      ["experiments.aot.train_step_report"],
      "train_step_report: --config and --target are needed; see --help",
    ),
    (
      ["experiments.aot.train_step_report", "--config=nowhere.py", "--target=h100x8"],
      "--config: there is no such file: 'nowhere.py'",
    ),
  ],
)
def test_errors_are_one_line(words, expected):
  # The last line: with CUDA wheels but no GPU jax logs lines before it.
  done = start(*words)
  assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, expected)


def test_documented_commands_exist():
  text = (provenance.CHECKOUT / "experiments/README.md").read_text()
  modules = set(re.findall(r"python -m (experiments[\w.]*)", text))
  assert COMMANDS.keys() <= modules
  assert not [module for module in modules if importlib.util.find_spec(module) is None]
