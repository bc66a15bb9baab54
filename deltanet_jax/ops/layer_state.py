"""Recurrent state of one layer inside the stacked states of all layers, updated in place.

A scan over layers carries the states as arrays with a leading layer axis. `LayerState` lets an
operator update one layer's entry inside the stack: slicing it out and writing it back would copy
the state twice more for every token.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
  """Entry `layer` of `stack` `[layers ..]`, for operators that update it in place."""

  stack: Array
  layer: Int[Array, ""]

  @property
  def shape(self) -> tuple[int, ...]:
    return self.stack.shape[1:]

  @property
  def dtype(self):
    return self.stack.dtype


def read(state: Array | LayerState) -> Array:
  """Return the state as an array: `state` itself, or its entry of the stack."""
  if isinstance(state, LayerState):
    return lax.dynamic_index_in_dim(state.stack, state.layer, keepdims=False)
  return state


def write(state: Array | LayerState, new: Array) -> Array | LayerState:
  """Replace the state by `new`; returns the same type as `state`."""
  if isinstance(state, LayerState):
    stack = lax.dynamic_update_index_in_dim(state.stack, new, state.layer, 0)
    return LayerState(stack, state.layer)
  return new


def write_at(state: Array | LayerState, new: Array, index: Array, axis: int) -> Array | LayerState:
  """Replace the part of the state that starts at `index` along `axis` by `new`.

  Args:
    state: An array, or a `LayerState`, whose stack is updated in place.
    new: The slice to write, of the state's rank.
    index: Start of the slice.
    axis: Axis of the state (not of the stack).
  """
  if isinstance(state, LayerState):
    start = [jnp.zeros_like(state.layer)] * state.stack.ndim
    start[0], start[axis + 1] = state.layer, index.astype(state.layer.dtype)
    return LayerState(lax.dynamic_update_slice(state.stack, new[None], start), state.layer)
  return lax.dynamic_update_slice_in_dim(state, new, index, axis)


def take(states, layer, in_place: tuple[str, ...]):
  """Select one layer from a pytree of stacked states.

  Args:
    states: Pytree of arrays with a leading layer axis.
    layer: Index of the layer.
    in_place: Names of entries to return as `LayerState`; the others are sliced out as arrays.
  """

  def one(path, stack):
    state = LayerState(stack, layer)
    return state if _name(path) in in_place else read(state)

  return jax.tree_util.tree_map_with_path(one, states)


def put(states, layer, new):
  """Write a layer's new states, of the structure that `take` returned, back into the stack."""

  def one(stack, x):
    return x.stack if isinstance(x, LayerState) else write(LayerState(stack, layer), x).stack

  return jax.tree.map(one, states, new)


def _name(path):
  return getattr(path[-1], "key", getattr(path[-1], "name", None)) if path else None
