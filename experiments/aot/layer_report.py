"""HBM traffic of one mixer layer, compiled AOT for a chip that is not attached.

Reports the traffic of the forward and of forward+backward over the bytes of the layer's bfloat16
input, and the instructions with the most traffic. Loop bodies (XLA scans over chunks) count once
per iteration. Needs `pip install -e .[aot]`.

  python -m experiments.aot.layer_report --preset=deltanet-1.3b --target=v5e
  python -m experiments.aot.layer_report --preset=deltanet-sliding-1.3b --target=h100 --segments
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

_PRESET = flags.DEFINE_enum("preset", "deltanet-1.3b", list(PRESETS), "Model preset.")
_MIXERS = flags.DEFINE_multi_string(
  "mixer", None, "Mixers of the preset to compile; all if unset; repeatable."
)
_TARGETS = flags.DEFINE_multi_enum(
  "target", ["v5e", "h100"], list(targets.TARGETS), "Chip to compile for; repeatable."
)
_BATCH = flags.DEFINE_integer("batch", 16, "Batch size.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Sequence length.", lower_bound=1)
_SEGMENTS = flags.DEFINE_bool("segments", False, "Pass segment_ids of packed sequences.")
flags.DEFINE_alias("documents", "segments")
_TOP = flags.DEFINE_integer("top", 8, "Number of instructions to list.", lower_bound=0)


def compile_layer(target, preset_name, mixer, batch, length, segments, backward):
  """Compile a mixer of the preset with bfloat16 weights. Call it in a `Worker`.

  Returns:
    Its HLO text and the bytes of its input.
  """
  cfg = preset(preset_name)
  make = lambda: build_mixer(cfg.mixers[mixer], cfg.width, rngs=nnx.Rngs(0))
  graph, weights = nnx.split(nnx.eval_shape(make))
  weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), weights)
  x = jax.ShapeDtypeStruct((batch, length, cfg.width), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((batch, length), jnp.int32) if segments else None
  run = lambda weights, x, ids: nnx.merge(graph, weights)(x, ids)
  both = lambda weights, x, ids, dy: jax.vjp(lambda *y: run(*y, ids), weights, x)[1](dy)
  args = (weights, x, ids, x) if backward else (weights, x, ids)
  compiled = compile_function(targets.one(target), both if backward else run, args)
  return compiled.hlo, x.size * x.dtype.itemsize


def measure(worker: Worker, key: dict) -> dict:
  """Metrics of one layer."""
  try:
    hlo, unit = worker.call(compile_layer, *key.values())
  except RuntimeError as error:  # of the compiler, or its process crashed
    return dict(error=str(error).strip().split("\n")[0])
  program = HloModule(hlo)
  found = sorted(program.moves(), key=lambda move: -move.bytes)
  kernels = collections.Counter()
  for move in found:
    if move.kernel:
      kernels[move.kernel] += move.bytes / unit
  return dict(
    error=None,
    hbm_over_input=sum(move.bytes for move in found) / unit,
    kernel_hbm_over_input=dict(kernels),
    unknown_trip_counts=len(program.unknown_trip_counts),
    largest=[(move.bytes / unit, move.name, move.source) for move in found[: _TOP.value]],
  )


def show(key: dict, metrics: dict) -> str:
  what = "forward+backward" if key["backward"] else "forward"
  head = f"\n{key['mixer']} on {key['target']}, {what}:"
  if metrics["error"]:
    return f"{head} does not compile: {metrics['error']}"
  unknown = metrics["unknown_trip_counts"]
  loops = f" ({unknown} loops of unknown trip count counted once)" if unknown else ""
  lines = [f"{head} HBM traffic {metrics['hbm_over_input']:.1f}x its input{loops}"]
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
    raise ValueError(f"--mixer={sorted(unknown)}: {_PRESET.value} has mixers {known}.")
  out = records.open("layer_report")
  shape = dict(batch=_BATCH.value, length=_LENGTH.value, segments=_SEGMENTS.value)
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
  print(f"\nall records: {out.path}")


if __name__ == "__main__":
  app.run(main)
