"""Train the missing runs of a sweep one after the other, and record each when it ends.

  python -m experiments.sweep --config=mqar                     # the set "small"
  python -m experiments.sweep --config=mqar --list --rows=paper # rows, their cost, runs done
  python -m experiments.sweep --config=mad --rows='small/deltanet*'
  python -m experiments.sweep --config=/any/path/table.py       # a file that defines ROWS
  python -m experiments.sweep --config=regbench --rows=paper --print_commands   # for a cluster

After an interruption (Ctrl-C, SIGTERM) the same command resumes, also in the middle of a run.
Several processes may run the same command: each trains rows that no other process is training. A
run is done if a record has the hash of its settings, and with --same_code also the hash of the
library's source code.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import os

import jax
from absl import flags

from deltanet_jax.files import as_local_path
from experiments.lib import app, config_modules, records, sweep_spec
from experiments.lib.sweep_runner import Sweep

_CONFIG = flags.DEFINE_string(
  "config", None, "File that defines ROWS: a name in experiments/configs, or a path."
)
_ROWS = flags.DEFINE_multi_string(
  "rows", ["small"], "A set, the name of a row, or a glob pattern of names; repeatable."
)
_LIST = flags.DEFINE_bool("list", False, "Print the rows, their cost and how many runs are done.")
_PRINT = flags.DEFINE_bool("print_commands", False, "Print a command for every unfinished row.")
_SAME_CODE = flags.DEFINE_bool(
  "same_code", False, "Count only records of the library's current source code as done."
)
_OUT = flags.DEFINE_string("out", "results/sweep", "Folder for runs in progress.")

# Small models gain nothing from a second core: run two processes to use both (BUILD_NOTES.md). XLA
# reads the variable when jax first computes.
_ONE_CORE = "--xla_cpu_multi_thread_eigen=false"


def main():
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_CORE}".strip()
  config, folder = _CONFIG.value, as_local_path(_OUT.value, "--out")
  if not config:
    names = ", ".join(config_modules.names_with("ROWS"))
    raise ValueError(
      f"--config is needed: the path of a file that defines ROWS, or one of {names}."
    )
  table = sweep_spec.load(config)
  rows = sweep_spec.select(table.rows, _ROWS.value)
  read_only = _LIST.value or _PRINT.value
  out = records.open(table.name, read_only=read_only)
  sweep = Sweep(table.name, rows, out, folder, same_code=_SAME_CODE.value)
  if _LIST.value:
    print(sweep.listing())
  elif _PRINT.value:
    for row in filter(sweep.missing, rows):
      print(f"python -m experiments.sweep --config={config} --rows='{row.name}'")
  else:
    # Learning rates and seeds of one row share one compiled program.
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    if elsewhere := sweep.train():
      print(f"being trained by other processes: {', '.join(elsewhere)}")
    print(f"{len(rows) - len(elsewhere)} rows are done; tables: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main, own_signals=True, expected=(ValueError, OSError))
