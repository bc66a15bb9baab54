"""Decoding at growing context: tokens/s and memory of DeltaNet beside Transformer++, in one run.

Each model reads a context of each length, then one compiled loop of --tokens tokens is timed,
all models and contexts in turn, so that a ratio compares runs of the same minute. A Transformer's
cache is as long as context and tokens. Memory is told three ways: bytes of the decode state; what
the compiled program that decodes as many tokens as the context takes beyond its weights and the
tokens it returns; and how far a process rises above itself while it really decodes them (Linux,
and only for models with a state that does not grow: the others would take hours).

  python -m experiments.bench.decode_speed            # a few minutes on two cores
"""

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
  "preset", ["deltanet-tiny", "transformer-tiny"], "Models to compare; repeat the flag."
)
_WIDTH = flags.DEFINE_integer("width", 256, "Width of every model.", lower_bound=1)
_DEPTH = flags.DEFINE_integer("depth", 4, "Layers of every model.", lower_bound=1)
_CONTEXTS = flags.DEFINE_multi_integer(
  "context", [10, 1000, 10000], "Tokens before the timed ones."
)
_TOKENS = flags.DEFINE_integer("tokens", 50, "Timed tokens.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 10, "Timed rounds; the best one counts.", lower_bound=1)

_NO_STOPS = np.zeros((0,), np.int32)
_PIECE = 500  # context tokens read at once: attention's scores are a piece by the whole cache


class Candidate:
  """One model that has read one context, ready to be timed."""

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
    # The loop takes its state over, so each round has a copy.
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
  """The state of a loop that has read `context` tokens and can go on for `room` more."""
  B = _BATCH.value
  read = jax.jit(lambda model, tokens, state: model.features(tokens, None, state)[1])
  state = model.init_state(B, context + room)
  for start in range(0, context, _PIECE):
    length = min(_PIECE, context - start)
    state = read(model, jnp.ones((B, length), jnp.int32), state)
  stopped = jnp.zeros((B,), bool)
  return Decoding(state, jnp.ones((B,), jnp.int32), stopped, jax.random.key(0))


def _loop(model, now, count):
  return decode.lower(model, now, _NO_STOPS, count, Sampling()).compile()


def _program_bytes(loop, count):
  """Memory of a loop of `count` tokens, weights and returned tokens (int32) apart."""
  memory = loop.memory_analysis()
  returned = 4 * count * _BATCH.value
  return memory.temp_size_in_bytes + memory.output_size_in_bytes - returned


def _process_bytes(loop, model):
  """How far the peak of the process rises over what it holds, while the loop runs from nothing."""
  now = jax.block_until_ready(_after(model, 0))
  before = _resident("VmRSS")
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
  jax.block_until_ready(loop(model, now, _NO_STOPS))
  return _resident("VmHWM") - before


def _resident(name):
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def show(rows: list[tuple[dict, dict]]) -> str:
  header = ["preset", "context", "tokens/s", "ratio", "state bytes", "program", "process"]
  first = {key["preset"]: metrics["tokens_per_second"] for key, metrics in reversed(rows)}
  lines = []
  for key, x in rows:
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
    print(f"{out.path} has all rows from this commit; --again measures them anew")
    return
  models = {name: build(preset(name, **shape)) for name in _PRESETS.value}
  candidates = [
    Candidate(models[key["preset"]], key["context"]) for key in tqdm(keys, desc="reading contexts")
  ]
  for _ in tqdm(range(_ROUNDS.value), unit="round", desc="decoding"):
    for candidate in candidates:
      candidate.time()
  rows = [(key, candidate.metrics()) for key, candidate in zip(keys, candidates)]
  for key, metrics in rows:
    out.write(key, metrics)
  print(show(rows))
  print(f"all rows: {out.path}; metrics: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
