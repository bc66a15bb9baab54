"""What one mixer layer moves to and from HBM on a chip that is not here, and which operations do.

Bytes of the compiled forward, and of forward and backward, over those of the layer's input in
bfloat16, and the operations that move most. What happens inside loops (plain scans over chunks) is
not counted, and said. Needs `pip install -e .[aot]`.

  python -m experiments.layer_report --preset=deltanet-1.3b --target=v5e
"""

import json
import pathlib

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx

from deltanet_jax.mixers import build_mixer
from deltanet_jax.models import PRESETS, preset
from experiments import ahead_of_time as aot
from experiments import provenance
from experiments.hlo_bytes import moves

_PRESET = flags.DEFINE_enum("preset", "deltanet-1.3b", list(PRESETS), "Model whose mixers to take.")
_TARGETS = flags.DEFINE_multi_enum("target", ["v5e", "h100"], list(aot.TARGETS), "Chips.")
_BATCH = flags.DEFINE_integer("batch", 16, "Rows.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens of a row.", lower_bound=1)
_TOP = flags.DEFINE_integer("top", 8, "Operations to list.", lower_bound=0)
_OUT = flags.DEFINE_string("out", "results/layer_report", "Folder for JSON lines.")


def compile_layer(target, name, mixer, batch, length, backward):
  """HLO of a mixer of the preset, its weights in bfloat16; to be called in a Worker."""
  cfg = preset(name)
  settings = cfg.mixers[mixer]
  if hasattr(settings, "implementation"):
    settings.implementation = "by_platform"
  make = lambda: build_mixer(settings, cfg.width, eps=1e-6, std=0.02, rngs=nnx.Rngs(0))
  graph, weights = nnx.split(nnx.eval_shape(make))
  weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), weights)
  x = jax.ShapeDtypeStruct((batch, length, cfg.width), jnp.bfloat16)
  run = lambda weights, x: nnx.merge(graph, weights)(x)
  both = lambda weights, x, dy: jax.vjp(run, weights, x)[1](dy)
  args = (weights, x, x) if backward else (weights, x)
  hlo = aot.compile_for(target, both if backward else run, args).hlo
  return hlo, x.size * x.dtype.itemsize


def measure(worker, target, mixer):
  """A row each for the forward and for forward and backward."""
  shape = dict(mixer=mixer, batch=_BATCH.value, length=_LENGTH.value)
  for backward in (False, True):
    row = dict(target=target, preset=_PRESET.value, **shape, backward=backward)
    try:
      hlo, unit = worker.call(compile_layer, target, _PRESET.value, *shape.values(), backward)
    except RuntimeError as error:  # the compilers' own, or the end of their process
      yield row | dict(error=str(error).strip().split("\n")[0])
      continue
    found = sorted(moves(hlo), key=lambda move: -move.bytes)
    yield row | dict(
      error=None,
      over_input=sum(move.bytes for move in found) / unit,
      kernels_over_input={move.kernel: move.bytes / unit for move in found if move.kernel},
      loops=sum(" while(" in line for line in hlo.split("\n")),
      largest=[(move.bytes / unit, move.name, move.source) for move in found[: _TOP.value]],
    )


def show(row):
  what = "forward and backward" if row["backward"] else "forward"
  head = f"\n{row['mixer']} on {row['target']}, {what}:"
  if row["error"]:
    print(head, "does not compile:", row["error"])
    return
  loops = f", without what {row['loops']} loops do" if row["loops"] else ""
  print(f"{head} {row['over_input']:.1f} x its input{loops}")
  for size, name, source in row["largest"]:
    print(f"  {size:6.2f}  {name[:40]:40}  {source[-60:]}")


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  targets = list(dict.fromkeys(_TARGETS.value))
  if problems := [x for x in map(aot.missing, targets) if x]:
    raise SystemExit("\n".join(problems))
  jax.config.update("jax_platforms", "cpu")
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  began = provenance.describe()
  with open(out / "layers.jsonl", "w", buffering=1) as lines:
    for target in targets:
      with aot.Worker(target) as worker:
        for mixer in preset(_PRESET.value).mixers:
          for row in measure(worker, target, mixer):
            show(row)
            lines.write(json.dumps(row | began) + "\n")
  print(f"\nwrote {out}/layers.jsonl")


if __name__ == "__main__":
  app.run(main)
