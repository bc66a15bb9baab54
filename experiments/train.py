"""Trains a model: `--config` is the experiment, `--workdir` is where it goes and goes on.

  python -m experiments.train --config=experiments/configs/demo.py --workdir=results/lm
  python -m experiments.train --config=experiments/configs/lm.py:deltanet-340m --workdir=DIR \\
    --config.data.corpus=CORPUS --config.mesh.fsdp=8

Every field can be set (`--config.optimizer.peak=1e-3`). Started again, the same command goes on
from the newest checkpoint. SIGTERM saves and exits with code 75. Many hosts: experiments/README.md.
"""

import pathlib
import sys

import jax
from absl import app, flags, logging

from deltanet_jax.config import TrainConfig
from deltanet_jax.data import Corpus, load_tokenizer, open_corpus, shipped_corpus
from deltanet_jax.data.prepare import prepare
from deltanet_jax.train.loop import DivergenceError, PreemptionError, train
from experiments import hosts, provenance
from experiments.config_file import CONFIG, parse

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of this run; created, or continued.")
_PROFILE = flags.DEFINE_bool("profile", False, "Write a trace of five updates to workdir/profile.")

PREEMPTED = 75  # "try again later", sysexits.h


def open_data(cfg: TrainConfig, workdir: pathlib.Path) -> Corpus:
  """The corpus of the configuration; the shipped novels are prepared into the workdir first."""
  if cfg.data.corpus:
    return open_corpus(cfg.data.corpus)
  folder = workdir / "corpus"
  if jax.process_index() == 0:
    prepare(shipped_corpus(), folder, load_tokenizer("bytes"), validation=0.1)
  hosts.wait_for_all("corpus")
  return open_corpus(folder)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  if CONFIG.value is None or not _WORKDIR.value:
    raise app.UsageError("--config and --workdir are needed; see --help")
  logging.set_verbosity(logging.WARNING)  # orbax tells every step of every save
  cfg, workdir = CONFIG.value, pathlib.Path(_WORKDIR.value)
  try:
    hosts.join()
    cfg.validate()
    results = train(
      cfg,
      workdir,
      lambda: open_data(cfg, workdir),
      origin=provenance.describe(),
      profile=_PROFILE.value,
      say=hosts.say,
    )
  except PreemptionError as e:
    hosts.say(str(e))
    sys.exit(PREEMPTED)
  except (ValueError, FileNotFoundError, DivergenceError) as e:
    raise SystemExit(f"train: {e}") from e
  hosts.say("  ".join(f"{name} {value:.4f}" for name, value in results.items()))


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
