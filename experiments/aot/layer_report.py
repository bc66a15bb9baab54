"""What one mixer layer moves to and from HBM on a chip that is not here, and which operations do.

HBM traffic of the compiled forward, and of forward and backward, over the bytes of the layer's
input in bfloat16, and the operations that move most; loops (plain scans over chunks) as often as
they run. Needs `pip install -e .[aot]`.

  python -m experiments.aot.layer_report --preset=deltanet-1.3b --target=v5e
  python -m experiments.aot.layer_report --preset=deltanet-sliding-1.3b --target=h100 --documents
"""

import collections
import time

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx
from tqdm import tqdm

from deltanet_jax.chips import CHIPS
from deltanet_jax.mixers import build_mixer
from deltanet_jax.models import PRESETS, preset
from experiments.aot import targets
from experiments.aot.hlo import HloModule
from experiments.aot.worker import Worker, compile_function
from experiments.lib import app, records

_PRESET = flags.DEFINE_enum("preset", "deltanet-1.3b", list(PRESETS), "Model whose mixers to take.")
_MIXERS = flags.DEFINE_multi_string("mixer", None, "Mixers of the model; all if unset.")
_TARGETS = flags.DEFINE_multi_enum("target", ["v5e", "h100"], list(targets.TARGETS), "Chips.")
_BATCH = flags.DEFINE_integer("batch", 16, "Rows.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens of a row.", lower_bound=1)
_DOCUMENTS = flags.DEFINE_bool("documents", False, "Rows hold packed documents.")
_TOP = flags.DEFINE_integer("top", 8, "Operations to list.", lower_bound=0)


def compile_layer(target, preset_name, mixer, batch, length, documents, backward):
  """HLO of a mixer of the preset, its weights in bfloat16, and the bytes of its input.

  To be called in a Worker.
  """
  cfg = preset(preset_name)
  make = lambda: build_mixer(cfg.mixers[mixer], cfg.width, rngs=nnx.Rngs(0))
  graph, weights = nnx.split(nnx.eval_shape(make))
  weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), weights)
  x = jax.ShapeDtypeStruct((batch, length, cfg.width), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((batch, length), jnp.int32) if documents else None
  run = lambda weights, x, ids: nnx.merge(graph, weights)(x, ids)
  both = lambda weights, x, ids, dy: jax.vjp(lambda *y: run(*y, ids), weights, x)[1](dy)
  args = (weights, x, ids, x) if backward else (weights, x, ids)
  compiled = compile_function(targets.one(target), both if backward else run, args)
  return compiled.hlo, x.size * x.dtype.itemsize


def measure(worker: Worker, key: dict) -> dict:
  """The metrics of one layer."""
  try:
    hlo, unit = worker.call(compile_layer, *key.values())
  except RuntimeError as error:  # the compilers' own, or the end of their process
    return dict(error=str(error).strip().split("\n")[0])
  program = HloModule(hlo)
  found = sorted(program.moves(), key=lambda move: -move.bytes)
  kernels = collections.Counter()
  for move in found:
    if move.kernel:
      kernels[move.kernel] += move.bytes / unit
  return dict(
    error=None,
    over_input=sum(move.bytes for move in found) / unit,
    kernels_over_input=dict(kernels),
    loops=len(program.unknown),
    largest=[(move.bytes / unit, move.name, move.source) for move in found[: _TOP.value]],
  )


def show(key: dict, metrics: dict) -> str:
  what = "forward and backward" if key["backward"] else "forward"
  head = f"\n{key['mixer']} on {key['target']}, {what}:"
  if metrics["error"]:
    return f"{head} does not compile: {metrics['error']}"
  loops = f", one round only of {metrics['loops']} loops" if metrics["loops"] else ""
  lines = [f"{head} {metrics['over_input']:.1f} x its input{loops}"]
  for size, name, source in metrics["largest"]:
    lines.append(f"  {size:6.2f}  {name[:40]:40}  {source[-60:]}")
  return "\n".join(lines)


def main():
  chosen = list(dict.fromkeys(_TARGETS.value))
  targets.check_installed([CHIPS[x].platform for x in chosen])
  jax.config.update("jax_platforms", "cpu")
  known = list(preset(_PRESET.value).mixers)
  mixers = _MIXERS.value or known
  if unknown := set(mixers) - set(known):
    raise ValueError(f"{_PRESET.value} has no mixer {sorted(unknown)}, only {known}.")
  out = records.open("layer_report")
  shape = dict(batch=_BATCH.value, length=_LENGTH.value, documents=_DOCUMENTS.value)
  for target in chosen:
    keys = [
      dict(target=target, preset=_PRESET.value, mixer=mixer, **shape, backward=backward)
      for mixer in mixers
      for backward in (False, True)
    ]
    with Worker(targets.one(target)) as worker:
      for key in tqdm([x for x in keys if not out.has(x)], unit="program", desc=target):
        start = time.perf_counter()
        metrics = measure(worker, key)
        out.write(key, metrics, time.perf_counter() - start)
        tqdm.write(show(key, metrics))
  print(f"\nall rows: {out.path}")


if __name__ == "__main__":
  app.run(main)
