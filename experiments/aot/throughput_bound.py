"""The paper's figure of training throughput for machines that are not here: bounds, no speeds.

  python -m experiments.aot.throughput_bound
  python -m experiments.aot.throughput_bound --target=h100x8 --model=deltanet --length=16384

Models of 1.3B, 16,384 tokens for each device in rows of every length, weights split over all
devices. An update is compiled by the machine's own compiler; its operations, HBM traffic and
collectives, each over what the data sheets give, tell how many tokens per second it cannot pass.
Nothing is computed again in the backward where that fits the memory, else every layer. Needs
`pip install -e .[aot]`.
"""

import time

import jax
from absl import flags
from tqdm import tqdm

from experiments.aot import roofline, targets
from experiments.lib import app, records
from experiments.lib.tables import table

_MODELS = flags.DEFINE_multi_enum(
  "model", roofline.FAMILIES, roofline.FAMILIES, "Models; repeat the flag."
)
_TARGETS = flags.DEFINE_multi_string(
  "target", ["h100x8", "v5e:4x4", "v5p:2x2x2"], "Machines; repeat the flag."
)
_LENGTHS = flags.DEFINE_multi_integer(
  "length", [2048, 4096, 8192, 16384], "Tokens of a row; repeat the flag."
)


def main():
  jax.config.update("jax_platforms", "cpu")
  machines = [targets.machine(name) for name in _TARGETS.value]
  targets.check_installed([machine.platform for machine in machines])
  for length in _LENGTHS.value:
    if roofline.TOKENS % length:
      raise ValueError(
        f"{roofline.TOKENS} tokens of a device are no whole rows of --length={length}."
      )
  out = records.open("throughput_bound")
  cases = [(m, n, name) for m in machines for n in _LENGTHS.value for name in _MODELS.value]
  lines = []
  for machine, length, name in (bar := tqdm(cases, unit="program")):
    key = dict(model=name, target=machine.name, length=length)
    if out.has(key):
      continue
    bar.set_description(f"{name} for {machine.name}, rows of {length}")
    start = time.perf_counter()
    metrics = roofline.measure(name, length, machine)
    out.write(key, metrics, time.perf_counter() - start)
    cells = [metrics.get("error", "does not fit"), ""]
    if metrics["fits"]:
      seconds = metrics["bound_seconds"]
      cells = [f"{metrics['bound_tokens_per_second']:,.0f}", max(seconds, key=seconds.get)]
    lines.append([name, machine.name, f"{length:,}", metrics["remat"], *cells])
  print(table(["model", "machine", "length", "remat", "bound, tokens/s", "by"], lines))
  print(f"all rows: {out.path}; tables: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
