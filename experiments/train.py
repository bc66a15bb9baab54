"""Trains a model: `--config` is the experiment, `--workdir` is where it goes and goes on.

  python -m experiments.train --config=experiments/configs/demo.py --workdir=results/lm
  python -m experiments.train --config=experiments/configs/lm.py:deltanet-340m --workdir=DIR \\
    --config.data.corpus=CORPUS --config.mesh.fsdp=8

Every field can be set (`--config.optimizer.learning_rate=1e-3`). Started again, the same command
goes on from the newest checkpoint. SIGTERM saves and exits with code 75, Ctrl-C saves and exits
with 130, a second Ctrl-C saves nothing. Many hosts: experiments/README.md.
"""

from experiments.lib import early_stop  # noqa: F401, before what takes seconds to import

# isort: split
import pathlib

from absl import flags

from deltanet_jax.train import DivergenceError
from experiments.lib import app, config_file, hosts, training
from experiments.lib.processes import say

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of this run; created, or continued.")
_PROFILE = flags.DEFINE_bool("profile", False, "Write a trace of five updates to workdir/profile.")
_FROM_SCRATCH = flags.DEFINE_bool(
  "from_scratch", False, "Start at 0 if every checkpoint of the workdir was damaged."
)


def main():
  cfg = config_file.CONFIG.value
  if cfg is None or not _WORKDIR.value:
    raise ValueError("--config and --workdir are needed; see --help.")
  workdir = pathlib.Path(_WORKDIR.value)
  hosts.join()
  task = training.open_task(cfg, workdir)
  options = dict(profile=_PROFILE.value, from_scratch=_FROM_SCRATCH.value)
  results = training.run(cfg, workdir, task, **options)
  say("  ".join(f"{name} {value:.4f}" for name, value in results.items()))


if __name__ == "__main__":
  expected = (ValueError, OSError, DivergenceError)
  app.run(main, expected=expected, parse=config_file.parse)
