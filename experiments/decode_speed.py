"""Decoding at growing context: tokens/s and memory of DeltaNet beside Transformer++, in one run.

For each context length the model decodes that many tokens into its context; then the same compiled
loop is timed, models in turn, so that a ratio compares runs of the same minute. A Transformer's
cache is as large as its context. Writes JSON lines.

  python -m experiments.decode_speed
"""

import json
import pathlib
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from deltanet_jax.generate import Sampling
from deltanet_jax.generate.loop import Decoding, decode
from deltanet_jax.models import build, preset
from experiments import provenance

_PRESETS = flags.DEFINE_multi_string(
  "preset", ["deltanet-tiny", "transformer-tiny"], "Models to compare; repeat the flag."
)
_CONTEXTS = flags.DEFINE_multi_integer(
  "context", [10, 1000, 10000], "Tokens before the timed ones."
)
_TOKENS = flags.DEFINE_integer("tokens", 100, "Timed tokens.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed rounds; the best one counts.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "results/decode_speed", "Folder for JSON lines.")


class Candidate:
  """One model, decoded into one context and ready to be timed."""

  def __init__(self, name, model, context):
    self.name, self.context, self.model = name, context, model
    self.best = float("inf")
    stops = jnp.zeros((0,), jnp.int32)
    rounds = _REPEATS.value + 1
    state = model.init_state(_BATCH.value, context + rounds * _TOKENS.value)
    token = jnp.ones((_BATCH.value,), jnp.int32)
    now = Decoding(state, token, jnp.zeros(token.shape, bool), jax.random.key(0))
    compiled = decode.lower(model, now, stops, context, Sampling()).compile()
    memory = compiled.memory_analysis()
    tokens_out = 4 * context * _BATCH.value
    self.state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    # What the loop needs beyond weights and the tokens it returns.
    self.loop_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes - tokens_out
    self.now, _ = compiled(model, now, stops)
    self.run = decode.lower(model, self.now, stops, _TOKENS.value, Sampling()).compile()
    self.stops = stops
    self.time()
    self.best = float("inf")

  def time(self):
    start = time.perf_counter()
    self.now, tokens = self.run(self.model, self.now, self.stops)
    jax.block_until_ready(tokens)
    self.best = min(self.best, time.perf_counter() - start)

  def row(self):
    per_second = _BATCH.value * _TOKENS.value / self.best
    return dict(
      preset=self.name,
      context=self.context,
      tokens_per_second=per_second,
      state_bytes=self.state_bytes,
      loop_bytes=self.loop_bytes,
    )


def main(_):
  models = {name: build(preset(name)) for name in _PRESETS.value}
  candidates = [
    Candidate(name, model, context) for context in _CONTEXTS.value for name, model in models.items()
  ]
  for _ in range(_REPEATS.value):
    for candidate in candidates:
      candidate.time()
  folder = pathlib.Path(_OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  rows = [candidate.row() for candidate in candidates]
  with (folder / "decode_speed.jsonl").open("w") as file:
    for row in rows:
      file.write(json.dumps(row | provenance.describe()) + "\n")
  first = {row["preset"]: row for row in reversed(rows)}
  print(
    f"{'preset':24}{'context':>9}{'tokens/s':>10}{'ratio':>7}{'state bytes':>13}{'loop bytes':>12}"
  )
  for row in rows:
    ratio = row["tokens_per_second"] / first[row["preset"]]["tokens_per_second"]
    print(
      f"{row['preset']:24}{row['context']:>9}{row['tokens_per_second']:>10.0f}{ratio:>7.2f}"
      f"{row['state_bytes']:>13,}{row['loop_bytes']:>12,}"
    )


if __name__ == "__main__":
  app.run(main)
