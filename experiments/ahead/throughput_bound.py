"""The paper's figure of training throughput for machines that are not here: bounds, no speeds.

  python -m experiments.ahead.throughput_bound
  python -m experiments.ahead.throughput_bound --target=h100x8 --model=deltanet --length=16384

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

from deltanet_jax.config import DataConfig, MeshConfig, TrainConfig
from deltanet_jax.models import preset
from experiments.ahead import targets, train_step
from experiments.lib import app, records
from experiments.lib.tables import table

_TOKENS = 16384  # of a device
# Bytes of a device below which no model is tried without remat: the smallest takes 53 GB then.
_ROOMY = 5e10
_FAMILIES = ["transformer", "mamba", "gla", "retnet", "deltanet"]
_FAMILIES += ["deltanet-sliding", "deltanet-global"]
_MODELS = flags.DEFINE_multi_enum("model", _FAMILIES, _FAMILIES, "Models; repeat the flag.")
_TARGETS = flags.DEFINE_multi_string(
  "target", ["h100x8", "v5e:4x4", "v5p:2x2x2"], "Machines; repeat the flag."
)
_LENGTHS = flags.DEFINE_multi_integer(
  "length", [2048, 4096, 8192, 16384], "Tokens of a row; repeat the flag."
)


def config(name: str, length: int, devices: int, remat: str) -> TrainConfig:
  rows = devices * _TOKENS // length
  return TrainConfig(
    model=preset(f"{name}-1.3b", dtype="bfloat16", remat=remat),
    data=DataConfig(length=length, batch=rows),
    mesh=MeshConfig(data=1, fsdp=devices),
    tokens=rows * length,
  )


def measure(name: str, length: int, machine: targets.Machine) -> dict:
  """Figures of the first remat that fits; if none does, those of the last, with its error."""
  for remat in ("none", "full") if machine.chip.memory > _ROOMY else ("full",):
    cfg = config(name, length, machine.size, remat)
    try:
      figures = train_step.measure(cfg, machine)
    except RuntimeError as error:  # of a compiler, for another reason than memory
      figures = dict(fits=False, error=str(error).strip().split("\n")[0])
    if figures["fits"]:
      break
  if "bound_seconds" in figures:
    figures["bound_tokens_per_second"] = _TOKENS / max(figures["bound_seconds"].values())
  return figures | dict(remat=remat)


def main():
  jax.config.update("jax_platforms", "cpu")
  machines = [targets.machine(name) for name in _TARGETS.value]
  targets.check_installed([machine.platform for machine in machines])
  for length in _LENGTHS.value:
    if _TOKENS % length:
      raise ValueError(f"{_TOKENS} tokens of a device are no whole rows of --length={length}.")
  out = records.open("throughput_bound")
  cases = [(m, n, name) for m in machines for n in _LENGTHS.value for name in _MODELS.value]
  lines = []
  for machine, length, name in (bar := tqdm(cases, unit="program")):
    key = dict(model=name, target=machine.name, length=length)
    if out.has(key):
      continue
    bar.set_description(f"{name} for {machine.name}, rows of {length}")
    start = time.perf_counter()
    figures = measure(name, length, machine)
    out.write(key, figures, time.perf_counter() - start)
    cells = [figures.get("error", "does not fit"), ""]
    if figures["fits"]:
      seconds = figures["bound_seconds"]
      cells = [f"{figures['bound_tokens_per_second']:,.0f}", max(seconds, key=seconds.get)]
    lines.append([name, machine.name, f"{length:,}", figures["remat"], *cells])
  print(table(["model", "machine", "length", "remat", "bound, tokens/s", "by"], lines))
  print(f"all rows: {out.path}; tables: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
