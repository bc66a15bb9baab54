"""Time the gradients of an ensemble: `jax.vmap` compared with a loop over its members.

Sweeps over seeds and learning rates could run as one program; this measures what that costs.
Gradients are compared first.

  python -m experiments.bench.ensemble_speed
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from tqdm import tqdm

from deltanet_jax.models import build, preset
from deltanet_jax.models.presets import FAMILIES
from deltanet_jax.ops import delta_rule
from deltanet_jax.ops.testing import Spec, random_inputs, rel_rms
from experiments.bench.timing import best_seconds
from experiments.lib import app, records
from experiments.lib.tables import table

_FAMILIES = flags.DEFINE_multi_enum(
  "family", ["deltanet", "gated-deltanet", "gla", "transformer"], FAMILIES,
  "Tiny model to measure, in addition to the operator; repeatable.",
)  # fmt: skip
_MEMBERS = flags.DEFINE_integer("members", 4, "Members of the ensemble.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 10, "Timed rounds, of which the fastest counts.", lower_bound=1
)

_OPERATOR = Spec(B=1, L=2048, H=4, dk=64)
_BATCH, _LENGTH = 4, 256


def operator():
  """Gradient function of the delta rule, and its arguments for each member."""
  inputs = [
    jax.tree.map(jnp.asarray, random_inputs(_OPERATOR, seed, dtype="float32"))
    for seed in range(_MEMBERS.value)
  ]
  return jax.grad(lambda x: jnp.sin(delta_rule(**x)[0]).sum()), [(x,) for x in inputs]


def model(family: str):
  """Gradient function of the loss, and weights and tokens of each member."""
  cfg = preset(f"{family}-tiny")
  models = [build(cfg, seed) for seed in range(_MEMBERS.value)]
  graph = nnx.graphdef(models[0])
  draw = np.random.default_rng(0).integers
  tokens = jnp.asarray(draw(0, cfg.vocab, (_MEMBERS.value, _BATCH, _LENGTH + 1)), jnp.int32)

  def loss(weights, tokens):
    scores = jax.nn.log_softmax(nnx.merge(graph, weights)(tokens[:, :-1]))
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=2).mean()

  return jax.grad(loss), [(nnx.state(x), y) for x, y in zip(models, tokens)]


def compare(gradient, members) -> dict:
  """Seconds of a loop and of vmap; ValueError if their gradients differ."""
  one, together = jax.jit(gradient), jax.jit(jax.vmap(gradient))
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
  got = together(*stacked)
  for i, member in enumerate(members):
    errors = jax.tree.map(lambda x, y: rel_rms(x[i], y), got, one(*member))
    if not max(jax.tree.leaves(errors)) < 1e-4:
      raise ValueError(f"the gradients of member {i} differ: {errors}")
  runs = dict(loop=lambda: [one(*x) for x in members], vmap=lambda: together(*stacked))
  seconds, rounds = best_seconds(runs, _ROUNDS.value, 0)
  return dict(**seconds, ratio=seconds["vmap"] / seconds["loop"], rounds=rounds)


def main():
  out = records.open("ensemble_speed")
  names = ["delta rule", *dict.fromkeys(_FAMILIES.value)]
  keys = {name: dict(of=name, members=_MEMBERS.value) for name in names}
  lines = []
  for name in (bar := tqdm([x for x in names if not out.has(keys[x])], unit="ensemble")):
    bar.set_description(name)
    metrics = compare(*(operator() if name == "delta rule" else model(name)))
    out.write(keys[name], metrics)
    lines.append([name, *(f"{1e3 * metrics[x]:.0f}" for x in ("loop", "vmap"))])
    lines[-1].append(f"{metrics['ratio']:.2f}")
  if lines:
    print(table(["model", "loop, ms", "vmap, ms", "vmap / loop"], lines))
  print(f"all records: {out.path}; table: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
