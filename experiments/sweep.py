"""Trains the rows of a table that are missing, one after the other, each kept as soon as it ends.

  python -m experiments.sweep --config=mqar                     # the small set
  python -m experiments.sweep --config=mqar --list --rows=paper # what there is, and what it costs
  python -m experiments.sweep --config=mad --rows='small/deltanet*'
  python -m experiments.sweep --config=regbench --rows=paper --print_commands   # for a cluster

Stopped (Ctrl-C, SIGTERM) and started again it goes on where it was, in the middle of a run too.
Started several times at once, each process takes rows that no other is training. A run counts as
done while its own settings are those that its row was made with; with --same_code also the source
of the library: both hashes are in the row.
"""

from experiments.lib import early_signals  # noqa: F401, before what takes seconds to import

# isort: split
import os
import pathlib

import jax
from absl import flags

from experiments.lib import app, records, sweep_spec
from experiments.lib.sweep_runner import Sweep

_CONFIG = flags.DEFINE_string("config", None, "Name of a table in experiments/configs with rows.")
_ROWS = flags.DEFINE_multi_string(
  "rows", ["small"], "A set, a row's name, or a pattern of names; repeatable."
)
_LIST = flags.DEFINE_bool("list", False, "Show the rows, what they cost and what is done.")
_PRINT = flags.DEFINE_bool("print_commands", False, "Print a command for every unfinished row.")
_SAME_CODE = flags.DEFINE_bool(
  "same_code", False, "Count only rows made by the library's source as it is now."
)
_OUT = flags.DEFINE_string("out", "results/sweep", "Folder of runs that are not finished.")


# Small models gain nothing from a second core: started twice it uses both (BUILD_NOTES.md). Read
# when jax first computes.
_ONE_CORE = "--xla_cpu_multi_thread_eigen=false"


def main():
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_CORE}".strip()
  name, folder = _CONFIG.value, pathlib.Path(_OUT.value)
  if not name:
    raise ValueError(f"--config is needed, one of {sweep_spec.tables()}.")
  rows = sweep_spec.select(sweep_spec.load(name), _ROWS.value)
  looking = _LIST.value or _PRINT.value
  sweep = Sweep(name, rows, records.open(name, reading=looking), folder, same_code=_SAME_CODE.value)
  if _LIST.value:
    print(sweep.listing())
  elif _PRINT.value:
    for row in filter(sweep.missing, rows):
      print(f"python -m experiments.sweep --config={name} --rows='{row.name}'")
  else:
    # Learning rates and seeds of one row are one program: compiled once.
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    if elsewhere := sweep.train():
      print(f"being trained by other processes: {', '.join(elsewhere)}")
    print(f"{len(rows) - len(elsewhere)} rows are done; tables: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, OSError))
