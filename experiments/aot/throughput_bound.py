"""Roofline upper bound on training throughput (the paper's throughput figure), compiled AOT.

  python -m experiments.aot.throughput_bound
  python -m experiments.aot.throughput_bound --target=h100x8 --model=deltanet --length=16384

Compiles one update of each 1.3B model with 16,384 tokens per device and fully sharded weights, at
several sequence lengths. The FLOPs, HBM traffic and collective bytes of the compiled program over
the data-sheet rates give an upper bound on tokens/s; nothing is run. Activations are saved if they
fit into memory, otherwise every layer is rematerialized. Needs `pip install -e .[aot]`.
"""

import time

import jax
from absl import flags
from tqdm import tqdm

from experiments.aot import targets
from experiments.aot.roofline import FAMILIES, TOKENS, measure
from experiments.lib import app, records
from experiments.lib.tables import table

_MODELS = flags.DEFINE_multi_enum("model", FAMILIES, FAMILIES, "Model family; repeatable.")
_TARGETS = flags.DEFINE_multi_string(
  "target", ["h100x8", "v5e:4x4", "v5p:2x2x2"], "Machine to compile for; repeatable."
)
_LENGTHS = flags.DEFINE_multi_integer(
  "length", [2048, 4096, 8192, 16384], "Sequence length; repeatable."
)


def main():
  jax.config.update("jax_platforms", "cpu")
  machines = [targets.machine(name) for name in _TARGETS.value]
  targets.check_installed([machine.platform for machine in machines])
  for length in _LENGTHS.value:
    if TOKENS % length:
      raise ValueError(f"--length={length} must divide the {TOKENS} tokens per device.")
  out = records.open("throughput_bound")
  cases = [(m, n, name) for m in machines for n in _LENGTHS.value for name in _MODELS.value]
  lines = []
  for machine, length, name in (bar := tqdm(cases, unit="program")):
    key = dict(model=name, target=machine.name, length=length)
    if out.has(key):
      continue
    bar.set_description(f"{name} for {machine.name}, sequence length {length}")
    start = time.perf_counter()
    metrics = measure(name, length, machine)
    out.write(key, metrics, time.perf_counter() - start)
    cells = [metrics.get("error", "does not fit"), ""]
    if metrics["fits"]:
      seconds = metrics["roofline_seconds"]
      cells = [f"{metrics['roofline_tokens_per_second']:,.0f}", max(seconds, key=seconds.get)]
    lines.append([name, machine.name, f"{length:,}", metrics["remat"], *cells])
  header = ["model", "machine", "sequence length", "remat", "upper bound, tokens/s per device"]
  print(table([*header, "limited by"], lines))
  print(f"all records: {out.path}; tables: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
