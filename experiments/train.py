"""Train a model, or resume training: `--config` is the experiment, `--workdir` the run's folder.

  python -m experiments.train --config=demo --workdir=results/lm
  python -m experiments.train --config=lm:deltanet-340m --workdir=DIR \\
    --config.data.corpus=CORPUS --config.mesh.fsdp=8
  python -m experiments.train --config=/any/path/config.py --workdir=DIR
  python -m experiments.train ... --workdir=NEW --init_from=RUN     # its weights, from step 0
  python -m experiments.train ... --workdir=RUN --config.tokens=2000000 --extend

`--config` is a name in experiments/configs or the path of a Python file; an argument of its
get_config may follow after a colon. Every field can be set
(`--config.optimizer.learning_rate=1e-3`). The same command resumes from the latest checkpoint.
`--task=module:function` trains on a task of yours: the function gets the config and returns a Task.
`--evaluator=module:function` adds metrics: it gets an EvalContext and yields (name, value).
SIGTERM saves a checkpoint and exits with code 75, Ctrl-C saves and exits with 130, a second Ctrl-C
exits without saving. Multiple hosts: experiments/README.md.

--extend resumes a run with a larger number of tokens: data and optimizer state continue, and the
learning rate follows the schedule of the longer run from that step on, so a cosine that has decayed
jumps up again (the command prints both values). For another schedule, start a new run from its
weights with --init_from.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split

from absl import flags

from deltanet_jax._extras import MissingExtraError
from deltanet_jax.config import to_json
from deltanet_jax.eval import Validation
from deltanet_jax.files import as_path
from deltanet_jax.train import DivergenceError, InitFrom, WandB, make_trainer
from experiments.lib import app, config_file, extensions, multihost, training
from experiments.lib.multihost import report

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of the run: created, or resumed if it exists."
)
_INIT_FROM = flags.DEFINE_string(
  "init_from",
  None,
  "Initial weights of a new run: the folder of a run, of exported weights, or of a public"
  " checkpoint. The run starts at step 0 with a new optimizer; the model must be the same.",
)
_INIT_STEP = flags.DEFINE_integer(
  "init_step", None, "Step of the checkpoint of --init_from; the latest complete one by default."
)
_OTHER_TOKENIZER = flags.DEFINE_bool(
  "allow_other_tokenizer",
  False,
  "Start from the weights of --init_from even if they were trained with another tokenizer than the"
  " corpus: token ids then mean other text.",
)
_EXTEND = flags.DEFINE_bool(
  "extend", False, "Resume the run with a larger --config.tokens; see above."
)
_TASK = flags.DEFINE_string(
  "task",
  None,
  "Task of yours instead of a corpus: module:function, called with the config, or the name of an"
  " entry point in deltanet_jax.tasks.",
)
_EVALUATORS = flags.DEFINE_multi_string(
  "evaluator",
  [],
  "Evaluator of yours: module:function, or the name of an entry point in deltanet_jax.evaluators;"
  " repeatable.",
)
_PROFILE = flags.DEFINE_bool("profile", False, "Write a trace of five updates to workdir/profile.")
_WANDB = flags.DEFINE_string(
  "wandb_project",
  None,
  "Also log to this project of Weights & Biases (extra `wandb`). WANDB_MODE=offline writes to"
  " workdir/wandb instead, for `wandb sync` later.",
)
_FROM_SCRATCH = flags.DEFINE_bool(
  "from_scratch", False, "Start at step 0 if all checkpoints of the workdir are damaged."
)


def main():
  cfg = config_file.CONFIG.value
  if cfg is None or not _WORKDIR.value:
    raise ValueError("--config and --workdir are needed; see --help.")
  if _INIT_STEP.value is not None and not _INIT_FROM.value:
    raise ValueError("--init_step needs --init_from: set both.")
  workdir, own = as_path(_WORKDIR.value), extensions.open_evaluators(_EVALUATORS.value)
  multihost.join()
  initial = None
  if _INIT_FROM.value:
    other = dict(allow_other_tokenizer=_OTHER_TOKENIZER.value)
    initial = InitFrom(_INIT_FROM.value, _INIT_STEP.value, **other, report=report)
  start = dict(initial=initial, extend=_EXTEND.value, trainer=make_trainer(cfg))
  loggers = [WandB(_WANDB.value, workdir, config=to_json(cfg))] if _WANDB.value else []
  task = training.open_task(cfg, workdir, _TASK.value, **start)
  evaluators = [Validation(task, cfg.eval_batches), *own]
  # `evaluate` opens the same task and evaluators.
  named = dict(task=_TASK.value, evaluators=_EVALUATORS.value)
  options = dict(profile=_PROFILE.value, from_scratch=_FROM_SCRATCH.value, loggers=loggers)
  options |= dict(origin={name: value for name, value in named.items() if value})
  results = training.run(cfg, workdir, task, evaluators, **start, **options)
  report("  ".join(f"{name} {value:.4f}" for name, value in results.items()))


if __name__ == "__main__":
  expected = (ValueError, OSError, DivergenceError, MissingExtraError)
  app.run(main, expected=expected, parse=config_file.parse, own_signals=True)
