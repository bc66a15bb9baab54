"""State tracking: negative eigenvalues and several delta steps per token, in one layer.

  python -m experiments.state_tracking                      # trains runs without a record
  python -m experiments.state_tracking --run=s3-deltaproduct --seed=3
  python -m experiments.plots                               # table and figure

Tokens are bits (parity) or permutations of three elements (s3); the target at each token is the
product of all tokens so far. Models are trained on short sequences and tested on longer ones. Each
run is recorded in experiments/results/state_tracking when it ends. After an interruption the same
command resumes, also in the middle of a run.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import dataclasses
import itertools

from absl import flags
from tqdm import tqdm

from deltanet_jax.data import StateTracking
from deltanet_jax.eval import AccuracyByLength
from deltanet_jax.files import as_local_path
from deltanet_jax.train import DivergenceError
from experiments.configs import state_tracking
from experiments.lib import app, records, training
from experiments.lib.tables import table
from experiments.lib.training_run import TrainingRun

_RUNS = flags.DEFINE_multi_enum(
  "run", list(state_tracking.RUNS), state_tracking.RUNS, "Group and mixer; repeatable."
)
_SEEDS = flags.DEFINE_multi_integer("seed", [0, 1, 2], "Seed of weights and data; repeatable.")
_LENGTHS = flags.DEFINE_multi_integer(
  "length", [16, 32, 64, 128, 256], "Sequence length to test on; repeatable."
)
_OUT = flags.DEFINE_string("out", "results/state_tracking", "Folder for runs in progress.")

_TEST_SEED = 1000  # differs from the seed of every training run: tests on unseen sequences


def make_run(group: str, mixer: str, seed: int) -> TrainingRun:
  cfg = dataclasses.replace(state_tracking.get_config(f"{group}-{mixer}"), seed=seed)
  task = lambda length, seed: StateTracking(group, length=length, batch=cfg.data.batch, seed=seed)
  tests = {length: task(length, _TEST_SEED) for length in _LENGTHS.value}
  return TrainingRun(cfg, task(cfg.data.length, seed), [AccuracyByLength(tests)])


def metrics(run: TrainingRun, last: dict[str, float]) -> dict:
  """Accuracy by sequence length, at the last token and at all tokens."""
  return dict(
    last={str(length): last[f"accuracy_last_{length}"] for length in _LENGTHS.value},
    all={str(length): last[f"accuracy_all_{length}"] for length in _LENGTHS.value},
    trained_length=run.config.data.length,
    updates=run.config.steps,
    parameters=run.parameters(),
  )


def main():
  out = records.open("state_tracking")
  keys = [
    dict(group=group, mixer=mixer, seed=seed)
    for seed, (group, mixer) in itertools.product(
      _SEEDS.value, (state_tracking.RUNS[name] for name in _RUNS.value)
    )
  ]
  lines = []
  for key in (bar := tqdm([x for x in keys if not out.has(x)], unit="run")):
    name = f"{key['group']}-{key['mixer']}"
    bar.set_description(f"{name}, seed {key['seed']}")
    run = make_run(**key)
    folder = as_local_path(_OUT.value, "--out")
    workdir = training.temporary_workdir(folder, f"{name}-{key['seed']}", run)
    found = training.train_and_record(
      run, workdir, key, lambda last, run=run: metrics(run, last), records=out
    )
    lines.append([name, str(key["seed"]), *(f"{x:.3f}" for x in found["last"].values())])
  if lines:
    header = ["run", "seed", *(f"last of {length}" for length in _LENGTHS.value)]
    print(table(header, lines))
  print(f"all records: {out.path}; table and figure: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main, own_signals=True, expected=(ValueError, OSError, DivergenceError))
