"""Trains a model: `--config` is the experiment, `--workdir` is where it goes and goes on.

  python -m experiments.train --config=experiments/configs/demo.py --workdir=results/lm
  python -m experiments.train --config=experiments/configs/lm.py:deltanet-340m --workdir=DIR \\
    --config.data.corpus=CORPUS --config.mesh.fsdp=8
  python -m experiments.train ... --workdir=NEW --init_from=RUN     # from its weights, at step 0
  python -m experiments.train ... --workdir=RUN --config.tokens=2000000 --extend

Every field can be set (`--config.optimizer.learning_rate=1e-3`). Started again, the same command
goes on from the newest checkpoint. SIGTERM saves and exits with code 75, Ctrl-C saves and exits
with 130, a second Ctrl-C saves nothing. Many hosts: experiments/README.md.

An extended run goes on with the data that come next and keeps its optimiser. Its learning rate is,
from that step on, the one of a run of the larger number of tokens: a cosine that had come down goes
up again to where it would be (the command says from what to what). For another schedule start a new
run from its weights, by --init_from.
"""

from experiments.lib import early_signals  # noqa: F401, before what takes seconds to import

# isort: split
import pathlib

from absl import flags

from deltanet_jax.train import DivergenceError, InitFrom, make_trainer
from experiments.lib import app, config_file, multihost, training
from experiments.lib.multihost import report

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of this run; created, or continued.")
_INIT_FROM = flags.DEFINE_string(
  "init_from",
  None,
  "Weights that a new run begins with: the folder of a run, of an export, or of a public"
  " checkpoint. Step and optimiser are new; the model must be the same.",
)
_INIT_STEP = flags.DEFINE_integer(
  "init_step", None, "Which checkpoint of the run in --init_from; the newest whole one by default."
)
_EXTEND = flags.DEFINE_bool(
  "extend", False, "Let a run of the workdir go on to a larger --config.tokens; see above."
)
_PROFILE = flags.DEFINE_bool("profile", False, "Write a trace of five updates to workdir/profile.")
_FROM_SCRATCH = flags.DEFINE_bool(
  "from_scratch", False, "Start at 0 if every checkpoint of the workdir was damaged."
)


def main():
  cfg = config_file.CONFIG.value
  if cfg is None or not _WORKDIR.value:
    raise ValueError("--config and --workdir are needed; see --help.")
  if _INIT_STEP.value is not None and not _INIT_FROM.value:
    raise ValueError("--init_step is of the run in --init_from: give both.")
  workdir = pathlib.Path(_WORKDIR.value)
  multihost.join()
  initial = (
    InitFrom(_INIT_FROM.value, _INIT_STEP.value, report=report) if _INIT_FROM.value else None
  )
  start = dict(initial=initial, extend=_EXTEND.value, trainer=make_trainer(cfg))
  task = training.open_task(cfg, workdir, **start)
  options = dict(profile=_PROFILE.value, from_scratch=_FROM_SCRATCH.value)
  results = training.run(cfg, workdir, task, **start, **options)
  report("  ".join(f"{name} {value:.4f}" for name, value in results.items()))


if __name__ == "__main__":
  expected = (ValueError, OSError, DivergenceError)
  app.run(main, expected=expected, parse=config_file.parse)
