"""Repeated layers with stacked weights, run by `lax.scan`: compile time is independent of depth."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array

from deltanet_jax.config import ModelConfig
from deltanet_jax.mixers import Layer
from deltanet_jax.models.block import Block
from deltanet_jax.ops import layer_state
from deltanet_jax.sharding import constrain

_POLICIES = {
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class Repeat:
  """A unit, the mixer names of consecutive layers, repeated `times` times."""

  unit: tuple[str, ...]
  times: int


def find_repeats(layers: tuple[str, ...]) -> list[Repeat]:
  """Split layers into repeated units: as few layers to compile as possible, then as few units."""
  # best[i] = (layers compiled, repeats) for layers[i:].
  best = [(0, [])]
  for i in reversed(range(len(layers))):
    options = []
    for p in range(1, len(layers) - i + 1):
      unit, times = layers[i : i + p], 1
      while layers[i + times * p : i + (times + 1) * p] == unit:
        times += 1
      cost, rest = best[len(layers) - i - times * p]
      options.append((cost + p, [Repeat(unit, times), *rest]))
    best.append(min(options, key=lambda option: (option[0], len(option[1]))))
  return best[-1][1]


class Unit(nnx.Module):
  """Consecutive layers."""

  def __init__(self, cfg: ModelConfig, names: tuple[str, ...], first, *, rngs):
    layers = (Layer(first + i, cfg.depth) for i in range(len(names)))
    self.blocks = nnx.List(
      [Block(cfg, name, layer, rngs=rngs) for name, layer in zip(names, layers)]
    )

  def __call__(self, x, segment_ids, states, layer, bounds):
    """Return x after the blocks and the updated states.

    Args:
      states: stacked states of all repetitions, of which index `layer` is updated.
    """
    new = []
    for i, block in enumerate(self.blocks):
      state = None
      if states is not None:
        state = layer_state.take(states[i], layer, block.mixer.in_place)
      x, state = block(x, segment_ids, state, bounds[i])
      new.append(None if states is None else layer_state.put(states[i], layer, state))
    return x, None if states is None else new


class Stack(nnx.Module):
  """A repeated unit from layer `first` on; weights and states have a leading axis `times`."""

  def __init__(self, cfg: ModelConfig, repeat: Repeat, first: int, *, rngs):
    self.times, self.names = repeat.times, repeat.unit
    self.remat, self.scan = cfg.remat, cfg.scan
    make = lambda key, first: Unit(cfg, repeat.unit, first, rngs=nnx.Rngs(key))
    firsts = first + len(repeat.unit) * jnp.arange(repeat.times, dtype=jnp.int32)
    self.unit = jax.vmap(make)(jax.random.split(rngs.params(), repeat.times), firsts)

  def init_state(self, batch: int, max_length: int, dtype) -> Any:
    make = lambda unit: [b.init_state(batch, max_length, dtype) for b in unit.blocks]
    return jax.vmap(make)(self.unit)

  def __call__(self, x: Array, segment_ids, states, bounds) -> tuple[Array, Any]:
    """Args: bounds: lower bounds `[times D]` of the decay, or None, for each block of the unit."""

    def body(carry, xs):
      # The stacked states are carried and updated in place: as scanned inputs and outputs they
      # would be copied for every token.
      (x, states), (unit, layer, bounds) = carry, xs
      return unit(constrain(x, "batch", "length", None), segment_ids, states, layer, bounds), None

    if self.remat != "none" and states is None:
      # Inside a scan, XLA cannot merge the recomputation with the forward pass (CSE).
      body = jax.checkpoint(body, policy=_POLICIES[self.remat], prevent_cse=not self.scan)
    layers = (self.unit, jnp.arange(self.times, dtype=jnp.int32), bounds)
    return lax.scan(body, (x, states), layers, unroll=1 if self.scan else self.times)[0]
