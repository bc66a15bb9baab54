"""Write table.md and figure.png of every result in experiments/results from its records.jsonl.

python -m experiments.plots
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
from types import ModuleType

from deltanet_jax import files
from experiments.lib import app, records
from experiments.plots import (
  compare_transformers,
  data_speed,
  decode_speed,
  demo,
  device_check,
  ensemble_speed,
  harness_speed,
  kernel_errors,
  kernel_report,
  kernel_speed,
  language_modeling,
  layer_report,
  mad,
  mixer_speed,
  mqar,
  regbench,
  regbench_ngram,
  state_tracking,
  throughput,
  throughput_bound,
  train_step_report,
)

# Name of a result -> its module: tables(records) returns Markdown, and figure(records), which some
# modules have, a figure.
MODULES: dict[str, ModuleType] = dict(
  demo=demo,
  state_tracking=state_tracking,
  mqar=mqar,
  mad=mad,
  regbench=regbench,
  language_modeling=language_modeling,
  kernel_speed=kernel_speed,
  decode_speed=decode_speed,
  harness_speed=harness_speed,
  data_speed=data_speed,
  ensemble_speed=ensemble_speed,
  mixer_speed=mixer_speed,
  kernel_report=kernel_report,
  kernel_errors=kernel_errors,
  device_check=device_check,
  layer_report=layer_report,
  compare_transformers=compare_transformers,
  regbench_ngram=regbench_ngram,
  throughput=throughput,
  throughput_bound=throughput_bound,
  train_step_report=train_step_report,
)


def document(name: str, rows: list[dict]) -> str:
  """The tables of a result, and the provenance of its records."""
  machines = ", ".join(sorted({row["provenance"]["machine"] for row in rows}))
  commits = ", ".join(sorted({row["provenance"]["commit"] for row in rows}))
  dates = sorted({row["provenance"]["date"][:10] for row in rows})
  when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
  warning = (
    "**From uncommitted code.** " if any("modified" in x["provenance"] for x in rows) else ""
  )
  return (
    f"{MODULES[name].tables(rows).strip()}\n\n"
    f"{warning}Made by `python -m experiments.plots` from {len(rows)} records of `records.jsonl`:"
    f" {machines}; {when}; commits {commits}.\n"
  )


def main():
  for name, module in MODULES.items():
    rows, folder = records.read(name), records.results() / name
    if not rows:
      print(f"{name}: no records in {folder}, skipped")
      continue
    files.write_text(folder / "table.md", document(name, rows))
    figure = module.figure(rows) if hasattr(module, "figure") else None
    if figure is not None:
      with files.replacing(folder / "figure.png") as new:
        figure.savefig(new, format="png", dpi=150, metadata={"Software": None})
    print(f"{name}: {folder}/table.md{'' if figure is None else ' and figure.png'}")


if __name__ == "__main__":
  app.run(main)
