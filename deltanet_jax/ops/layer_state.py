"""The state of one layer among those of all layers, changed in place."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
  """Entry `layer` of a stack, for operators that change it where it lies.

  Taken out and put back, a state would be copied twice more for every token.
  """

  stack: Array
  layer: Int[Array, ""]

  @property
  def shape(self) -> tuple[int, ...]:
    return self.stack.shape[1:]

  @property
  def dtype(self):
    return self.stack.dtype


def read(state: Array | LayerState) -> Array:
  """The array itself, or the one of the slot."""
  if isinstance(state, LayerState):
    return lax.dynamic_index_in_dim(state.stack, state.layer, keepdims=False)
  return state


def write(state: Array | LayerState, new: Array) -> Array | LayerState:
  """`new` in the place of `state`."""
  if isinstance(state, LayerState):
    stack = lax.dynamic_update_index_in_dim(state.stack, new, state.layer, 0)
    return LayerState(stack, state.layer)
  return new


def write_at(state: Array | LayerState, new: Array, index: Array, axis: int) -> Array | LayerState:
  """The state with `new` from `index` on along `axis`."""
  if isinstance(state, LayerState):
    start = [jnp.zeros_like(state.layer)] * state.stack.ndim
    start[0], start[axis + 1] = state.layer, index.astype(state.layer.dtype)
    return LayerState(lax.dynamic_update_slice(state.stack, new[None], start), state.layer)
  return lax.dynamic_update_slice_in_dim(state, new, index, axis)


def take(states, layer, in_place: tuple[str, ...]):
  """One layer of stacked states: entries of these names as slots, the others as arrays."""

  def one(path, stack):
    slot = LayerState(stack, layer)
    return slot if _name(path) in in_place else read(slot)

  return jax.tree_util.tree_map_with_path(one, states)


def put(states, layer, new):
  """The stacked states after a layer has changed what it was given by `take`."""

  def one(stack, x):
    return x.stack if isinstance(x, LayerState) else write(LayerState(stack, layer), x).stack

  return jax.tree.map(one, states, new)


def _name(path):
  return getattr(path[-1], "key", getattr(path[-1], "name", None)) if path else None
