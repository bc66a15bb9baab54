"""State tracking: what negative eigenvalues and several delta steps per token add, in one layer.

  python -m experiments.state_tracking                      # trains what has no row yet
  python -m experiments.state_tracking --run=s3-deltaproduct --seed=3
  python -m experiments.plots                               # table and figure

Tokens are bits (parity) or permutations of three things (s3), and the target at each is the product
of all so far. Models are trained on short rows; accuracy is measured on longer ones. Each run has a
row in experiments/results/state_tracking as soon as it is trained. Stopped and started again, the
command goes on where it was, in the middle of a run too.
"""

from experiments.lib import early_signals  # noqa: F401, before what takes seconds to import

# isort: split
import dataclasses
import itertools
import pathlib
import shutil
import time

from absl import flags
from tqdm import tqdm

from deltanet_jax.config import TrainConfig
from deltanet_jax.data import StateTracking
from deltanet_jax.eval import AccuracyByLength
from deltanet_jax.models import count_parameters
from deltanet_jax.train import DivergenceError, saved_steps
from experiments.configs import state_tracking
from experiments.lib import app, provenance, records, training
from experiments.lib.tables import table

_RUNS = flags.DEFINE_multi_enum(
  "run", list(state_tracking.RUNS), state_tracking.RUNS, "Group and mixer; repeatable."
)
_SEEDS = flags.DEFINE_multi_integer("seed", [0, 1, 2], "Of weights and data; repeatable.")
_LENGTHS = flags.DEFINE_multi_integer("length", [16, 32, 64, 128, 256], "To test; repeatable.")
_OUT = flags.DEFINE_string("out", "results/state_tracking", "Folder of runs that are not finished.")

_HELD_OUT = 1000  # more than a seed of training: rows that no run was trained on


def measure(cfg: TrainConfig, group: str, workdir: pathlib.Path) -> dict:
  """Accuracy by length of a model that is trained here, or goes on from its last checkpoint."""
  begun, start = saved_steps(workdir), time.perf_counter()
  batch, length = cfg.data.batch, cfg.data.length
  task = StateTracking(group, length=length, batch=batch, seed=cfg.seed)
  tests = {L: StateTracking(group, length=L, batch=batch, seed=_HELD_OUT) for L in _LENGTHS.value}
  results = training.run(cfg, workdir, task, [AccuracyByLength(tests)])
  return dict(
    last={str(L): results[f"accuracy_last_{L}"] for L in _LENGTHS.value},
    all={str(L): results[f"accuracy_all_{L}"] for L in _LENGTHS.value},
    trained_length=length,
    updates=cfg.steps,
    parameters=count_parameters(cfg.model),
    # Of a run that went on in several starts nobody knows.
    seconds=None if begun else round(time.perf_counter() - start, 1),
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
    cfg = dataclasses.replace(state_tracking.get_config(name), seed=key["seed"])
    # Only what this commit has begun goes on: a row is of one code.
    workdir = pathlib.Path(_OUT.value) / f"{name}-{key['seed']}-{provenance.commit()}"
    metrics = measure(cfg, key["group"], workdir)
    out.write(key, metrics)
    shutil.rmtree(workdir)  # so that --again trains anew
    lines.append([name, str(key["seed"]), *(f"{x:.3f}" for x in metrics["last"].values())])
  if lines:
    header = ["run", "seed", *(f"last of {L}" for L in _LENGTHS.value)]
    print(table(header, lines))
  print(f"all rows: {out.path}; table and figure: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, OSError, DivergenceError))
