"""Time one layer of every mixer (forward+backward), and its temporary memory, against DeltaNet.

All are timed alternately in one run, with default settings of each mixer (also of heads) and one
width.

  python -m experiments.bench.mixer_speed
  python -m experiments.bench.mixer_speed --kind=deltanet --kind=kda --length=4096
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from tqdm import tqdm

from deltanet_jax.mixers import MIXERS, build_mixer, mixer_config
from experiments.bench.timing import best_seconds
from experiments.lib import app, records
from experiments.lib.tables import table

_KINDS = flags.DEFINE_multi_enum("kind", list(MIXERS), list(MIXERS), "Mixers; repeatable.")
_WIDTH = flags.DEFINE_integer("width", 512, "Width of the layer.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Sequence length.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 1, "Batch size.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Timed rounds, of which the fastest counts.", lower_bound=1
)

_BASELINE = "deltanet"


def program(kind: str):
  """Compiled forward+backward of one layer, and its arguments."""
  make = lambda: build_mixer(mixer_config(kind)(), _WIDTH.value, rngs=nnx.Rngs(params=0))
  mixer = jax.jit(make)()
  rng = np.random.default_rng(0)
  x, dy = (
    jnp.asarray(rng.standard_normal((_BATCH.value, _LENGTH.value, _WIDTH.value)), jnp.float32)
    for _ in range(2)
  )

  def gradient(mixer, x, dy):
    y, vjp = jax.vjp(lambda mixer, x: mixer(x), mixer, x)
    return y, vjp(dy)

  return jax.jit(gradient).lower(mixer, x, dy).compile(), (mixer, x, dy)


def main():
  out = records.open("mixer_speed")
  size = dict(width=_WIDTH.value, length=_LENGTH.value, batch=_BATCH.value)
  kinds = list(dict.fromkeys([_BASELINE, *_KINDS.value]))
  keys = {kind: dict(kind=kind, **size) for kind in kinds}
  if all(map(out.has, keys.values())):
    print(f"this commit has all records: {out.path}; table: python -m experiments.plots")
    return
  # Ratios need all mixers in one run.
  programs = {kind: program(kind) for kind in tqdm(kinds, desc="compiling", unit="mixer")}
  for compiled, args in programs.values():
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(compiled(*args))):
      raise ValueError("an output or gradient is non-finite.")
  runs = {kind: lambda run=run, args=args: run(*args) for kind, (run, args) in programs.items()}
  seconds, rounds = best_seconds(runs, _ROUNDS.value, 0)
  temporary = {
    kind: run.memory_analysis().temp_size_in_bytes for kind, (run, _) in programs.items()
  }
  lines = []
  for kind in kinds:
    metrics = dict(
      seconds=seconds[kind],
      temporary_bytes=temporary[kind],
      over_deltanet=seconds[kind] / seconds[_BASELINE],
      memory_over_deltanet=temporary[kind] / temporary[_BASELINE],
      rounds=rounds,
    )
    out.write(keys[kind], metrics)
    ratios = [f"{metrics[x]:.2f}" for x in ("over_deltanet", "memory_over_deltanet")]
    lines.append([kind, f"{1e3 * seconds[kind]:.0f}", ratios[0], f"{temporary[kind] / 2**20:.0f}"])
    lines[-1].append(ratios[1])
  print(table(["mixer", "ms", "× DeltaNet", "temporary MiB", "× DeltaNet"], lines))
  print(f"all records: {out.path}; table: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
