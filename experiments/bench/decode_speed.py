"""Measure decoding at growing context lengths: tokens/s and memory of DeltaNet and Transformer++.

Each model prefills a context of each length, then one compiled loop of --tokens tokens is timed,
all models and contexts alternately, so that ratios compare runs of the same minute. The KV cache of
a Transformer has room for context and tokens. Memory is reported in three ways: bytes of the decode
state; memory of the compiled program that decodes as many tokens as the context, without weights
and returned tokens; and the increase of the peak resident memory of the process while it decodes
them (Linux, only for models with a state of constant size: the others would take hours).

  python -m experiments.bench.decode_speed            # a few minutes on two cores
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from deltanet_jax.generate import Sampling
from deltanet_jax.generate.loop import Decoding, decode
from deltanet_jax.models import build, preset
from experiments.lib import app, records
from experiments.lib.tables import table

_PRESETS = flags.DEFINE_multi_string(
  "preset", ["deltanet-tiny", "transformer-tiny"], "Preset to measure; repeatable."
)
_WIDTH = flags.DEFINE_integer("width", 256, "Width of every model.", lower_bound=1)
_DEPTH = flags.DEFINE_integer("depth", 4, "Layers of every model.", lower_bound=1)
_CONTEXTS = flags.DEFINE_multi_integer(
  "context", [10, 1000, 10000], "Context length in tokens; repeatable."
)
_TOKENS = flags.DEFINE_integer("tokens", 50, "Number of timed tokens.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 1, "Batch size.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 10, "Timed rounds, of which the fastest counts.", lower_bound=1
)

_NO_STOPS = np.zeros((0,), np.int32)
_PREFILL_CHUNK = 500  # context tokens per call: attention scores have this many rows


class Candidate:
  """One model after the prefill of one context, ready to be timed."""

  def __init__(self, model, context):
    self.model = model
    loop = _loop(
      model, jax.eval_shape(lambda model: _after(model, 0, room=context), model), context
    )
    self.program_bytes = _program_bytes(loop, context)
    grows = _state_bytes(model, context) > _state_bytes(model, 1)
    self.process_bytes = None if grows else _process_bytes(loop, model)
    self.state_bytes = _state_bytes(model, context + _TOKENS.value)
    self.before = _after(model, context, room=_TOKENS.value)
    self.run = _loop(model, self.before, _TOKENS.value)
    self.seconds = []
    self.time()
    self.seconds.clear()

  def time(self):
    # The loop donates its state, so each round needs a copy.
    now = jax.block_until_ready(jax.tree.map(jnp.copy, self.before))
    start = time.perf_counter()
    jax.block_until_ready(self.run(self.model, now, _NO_STOPS))
    self.seconds.append(time.perf_counter() - start)

  def metrics(self):
    return dict(
      tokens_per_second=_BATCH.value * _TOKENS.value / min(self.seconds),
      seconds=self.seconds,
      state_bytes=self.state_bytes,
      program_bytes=self.program_bytes,
      process_bytes=self.process_bytes,
    )


def _state_bytes(model, length):
  state = jax.eval_shape(lambda model: model.init_state(_BATCH.value, length), model)
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def _after(model, context, room=0):
  """The state of the decode loop after `context` tokens, with room for `room` more."""
  B = _BATCH.value
  read = jax.jit(lambda model, tokens, state: model.features(tokens, None, state)[1])
  state = model.init_state(B, context + room)
  for start in range(0, context, _PREFILL_CHUNK):
    length = min(_PREFILL_CHUNK, context - start)
    state = read(model, jnp.ones((B, length), jnp.int32), state)
  stopped = jnp.zeros((B,), bool)
  return Decoding(state, jnp.ones((B,), jnp.int32), stopped, jax.random.key(0))


def _loop(model, now, count):
  return decode.lower(model, now, _NO_STOPS, count, Sampling()).compile()


def _program_bytes(loop, count):
  """Memory of a loop of `count` tokens, without weights and returned tokens (int32)."""
  memory = loop.memory_analysis()
  returned = 4 * count * _BATCH.value
  return memory.temp_size_in_bytes + memory.output_size_in_bytes - returned


def _process_bytes(loop, model):
  """Peak resident memory while the loop runs from an empty context, minus that before it."""
  now = jax.block_until_ready(_after(model, 0))
  before = _resident("VmRSS")
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # reset the peak
  jax.block_until_ready(loop(model, now, _NO_STOPS))
  return _resident("VmHWM") - before


def _resident(name):
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def show(results: list[tuple[dict, dict]]) -> str:
  header = ["preset", "context", "tokens/s", "ratio", "state bytes", "program", "process"]
  first = {key["preset"]: metrics["tokens_per_second"] for key, metrics in reversed(results)}
  lines = []
  for key, x in results:
    ratio = x["tokens_per_second"] / first[key["preset"]]
    process = "-" if x["process_bytes"] is None else f"{x['process_bytes']:,}"
    cells = [key["preset"], f"{key['context']:,}", f"{x['tokens_per_second']:.0f}", f"{ratio:.2f}"]
    lines.append([*cells, f"{x['state_bytes']:,}", f"{x['program_bytes']:,}", process])
  return table(header, lines)


def main():
  out = records.open("decode_speed")
  shape = dict(width=_WIDTH.value, depth=_DEPTH.value)
  rest = dict(batch=_BATCH.value, tokens=_TOKENS.value)
  keys = [
    dict(preset=name, **shape, **rest, context=context)
    for name in _PRESETS.value
    for context in _CONTEXTS.value
  ]
  if all(map(out.has, keys)):
    print(f"{out.path} has all records of this commit; --again measures them again")
    return
  models = {name: build(preset(name, **shape)) for name in _PRESETS.value}
  candidates = [
    Candidate(models[key["preset"]], key["context"]) for key in tqdm(keys, desc="prefill")
  ]
  for _ in tqdm(range(_ROUNDS.value), unit="round", desc="decoding"):
    for candidate in candidates:
      candidate.time()
  results = [(key, candidate.metrics()) for key, candidate in zip(keys, candidates)]
  for key, metrics in results:
    out.write(key, metrics)
  print(show(results))
  print(f"all records: {out.path}; table and figure: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
