"""Compiles the training step for a machine that is not here, and says whether it fits.

  python -m experiments.compile_ahead --config=experiments/configs/lm.py:deltanet-1.3b \\
    --target=h100x8
  python -m experiments.compile_ahead --config=experiments/configs/lm.py:deltanet-340m \\
    --target=v5e:16x16 --target=v5p:4x4x4 --config.mesh.data=16 --config.mesh.fsdp=-1

Memory of each device, collectives, operations: what the real compilers make of the same step that
`experiments.train` runs, and of the device's own kernels. Needs `pip install -e .[aot]`, no
accelerator. Nothing is run: no figure here is a time.
"""

import json
import pathlib
import sys

import jax
from absl import app, flags

from experiments import config_file, pod_report, pods, provenance

_TARGETS = flags.DEFINE_multi_string(
  "target", None, "Machine: h100x8, a100x8, h100x128, v5e:16x16, v5p:4x4x4; repeat for several."
)
_OUT = flags.DEFINE_string("out", "results/compile_ahead.jsonl", "JSON lines are added to it.")


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  if config_file.CONFIG.value is None or not _TARGETS.value:
    raise app.UsageError("--config and --target are needed; see --help")
  jax.config.update("jax_platforms", "cpu")
  out, rows = pathlib.Path(_OUT.value), []
  origin = provenance.describe() | dict(
    command=" ".join(x for x in sys.argv[1:] if not x.startswith("--out"))
  )
  try:
    config_file.CONFIG.value.validate()
    machines = [pods.machine(target) for target in _TARGETS.value]
    for machine in machines:
      print(f"compiling for {machine.name}, minutes for a large one ...", flush=True)
      row = pods.compile_update(config_file.CONFIG.value, machine)
      rows.append(row := dict(config=config_file.name()) | row | origin)
      out.parent.mkdir(parents=True, exist_ok=True)
      with open(out, "a") as lines:
        lines.write(json.dumps(row) + "\n")
      print(pod_report.tell(row) + "\n", flush=True)
  except (ValueError, RuntimeError, FileNotFoundError) as e:
    raise SystemExit(f"compile_ahead: {e}") from e
  print(f"{pod_report.markdown(rows)}\nadded to {out}")


if __name__ == "__main__":
  app.run(main, flags_parser=config_file.parse)
