"""Train the missing runs of a sweep, and record each when it ends.

  python -m experiments.sweep --config=mqar                     # the set "small"
  python -m experiments.sweep --config=mqar --list --rows=paper # rows, their cost, runs done
  python -m experiments.sweep --config=mad --rows='small/deltanet*'
  python -m experiments.sweep --config=/any/path/table.py --out=FOLDER --jobs=2   # a table of yours
  python -m experiments.sweep --config=regbench --rows=paper --print_commands     # for a cluster

A table is a Python file that defines ROWS (experiments/README.md has an example). Records of a
table of yours go to OUT/<table>/records.jsonl, those of experiments/configs to its results.

After an interruption (Ctrl-C, SIGTERM) the same command resumes, also in the middle of a run.
--jobs=N trains N rows at once, each in a process of its own with its output in OUT/<table>/logs; a
row that fails is reported, and the others continue. Several processes may also run the same
command: each trains rows that no other process is training. A run is done if a record has the hash
of its settings, and with --same_code also the hash of the library's source code.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import os
import pathlib
import shlex
import sys

import jax
from absl import flags

from deltanet_jax import cli, files
from experiments.lib import (
  app,
  config_modules,
  exit_codes,
  import_flag,
  job_pool,
  records,
  sweep_spec,
)
from experiments.lib.sweep_runner import Sweep

_CONFIG = flags.DEFINE_string(
  "config", None, "File that defines ROWS: a name in experiments/configs, or a path."
)
_ROWS = flags.DEFINE_multi_string(
  "rows",
  None,
  "A set, the name of a row, or a glob pattern of names; repeatable. By default the set `small`, or"
  " all rows of a table of yours.",
)
_JOBS = flags.DEFINE_integer("jobs", 1, "Number of rows to train at once.", lower_bound=1)
_LIST = flags.DEFINE_bool("list", False, "Print the rows, their cost and how many runs are done.")
_PRINT = flags.DEFINE_bool("print_commands", False, "Print a command for every unfinished row.")
_SAME_CODE = flags.DEFINE_bool(
  "same_code", False, "Count only records of the library's current source code as done."
)
_OUT = flags.DEFINE_string(
  "out", "results/sweep", "Folder for runs in progress, and for records of a table of yours."
)

# Small models gain nothing from a second core: run two processes to use both (BUILD_NOTES.md). XLA
# reads the variable when jax first computes.
_ONE_CORE = "--xla_cpu_multi_thread_eigen=false"


def main():
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_CORE}".strip()
  import_flag.import_modules()
  config, folder = _CONFIG.value, files.as_local_path(_OUT.value, "--out")
  if not config:
    names = ", ".join(config_modules.names_with("ROWS"))
    raise ValueError(
      f"--config is needed: the path of a file that defines ROWS, or one of {names}."
    )
  table = sweep_spec.load(config)
  patterns = _ROWS.value or (["small"] if table.builtin else ["*"])
  rows = sweep_spec.select(table.rows, patterns)
  pool = _JOBS.value > 1 and not (_LIST.value or _PRINT.value)
  # A process that only starts others must not take the accelerator, whose name records contain.
  out = _records(table, read_only=pool or _LIST.value or _PRINT.value)
  sweep = Sweep(table.name, rows, out, folder, same_code=_SAME_CODE.value)
  if _LIST.value:
    print(sweep.listing())
  elif _PRINT.value:
    for row in filter(sweep.missing, rows):
      print(f"{cli.prefix}sweep {shlex.join(_flags(row.name))}")
  else:
    files.check_writable(folder)
    elsewhere = _train_in_pool(sweep, table) if pool else _train_here(sweep, folder)
    if elsewhere:
      print(f"being trained by other processes: {', '.join(elsewhere)}")
    print(f"{len(rows) - len(elsewhere)} rows are done; ", end="")
    if table.builtin:
      print("tables: python -m experiments.plots")
    else:
      print(f"records: {out.path}")
      finished = records.Records(out.path, {})  # also with --again
      print(Sweep(table.name, rows, finished, folder).summary(), end="")


def _records(table: sweep_spec.Table, *, read_only: bool) -> records.Records:
  if table.builtin or flags.FLAGS["results"].present:
    return records.open(table.name, read_only=read_only)
  return records.open_folder(pathlib.Path(_OUT.value) / table.name, read_only=read_only)


def _flags(row: str) -> list[str]:
  """The flags of this command, for one row."""
  own = [x for x in flags.FLAGS.get_key_flags_for_module(sys.argv[0]) if x.present]
  kept = [x for x in own if x.name not in ("rows", "jobs", "print_commands", "list", "config")]
  words = [word for flag in kept for word in flag.serialize().splitlines()]
  return [f"--config={_CONFIG.value}", f"--rows={row}", *words]


def _train_here(sweep: Sweep, folder: pathlib.Path) -> list[str]:
  # Learning rates and seeds of one row share one compiled program.
  jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
  return sweep.train()


def _train_in_pool(sweep: Sweep, table: sweep_spec.Table) -> list[str]:
  """Train the rows in processes of their own; return names of rows that others are training.

  Raises:
    ValueError: rows have failed; the others are done.
  """
  rows = sweep.rows_to_train()
  logs = pathlib.Path(_OUT.value) / table.name / "logs"
  # Not experiments.sweep: a folder `experiments` of the user's would be found first.
  command = [sys.executable, "-m", "deltanet_jax", "sweep"]
  jobs = [
    job_pool.Job(row.name, [*command, *_flags(row.name)], logs / f"{row.name}.log") for row in rows
  ]
  print(f"{len(rows)} rows to train, {_JOBS.value} at once; output in {logs}", flush=True)
  left = len(jobs)

  def report(job: job_pool.Job, code: int, seconds: float):
    nonlocal left
    left -= 1
    match code:
      case 0:
        outcome = "ended"
      case exit_codes.INTERRUPTED | exit_codes.PREEMPTED:
        outcome = f"stopped: {job.last_line()}"
      case _:
        outcome = f"failed with exit code {code}: {job.last_line()}"
    print(f"{job.name} {outcome} ({seconds:.0f} s; rows left: {left})", flush=True)

  try:
    codes = job_pool.run(jobs, _JOBS.value, report)
  except job_pool.StoppedError as e:
    print(f"sweep: {e}", file=sys.stderr)
    raise SystemExit(e.code) from e
  if failed := [name for name, code in codes.items() if code]:
    raise ValueError(
      f"{len(failed)} of {len(jobs)} rows failed ({', '.join(failed)}): see {logs}; the same"
      " command trains what is missing."
    )
  finished = Sweep(
    table.name, rows, records.Records(_records(table, read_only=True).path, {}), logs
  )
  return [row.name for row in rows if finished.missing(row)]


if __name__ == "__main__":
  app.run(main, own_signals=True, expected=(ValueError, OSError))
