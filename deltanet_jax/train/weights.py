"""A model's weights as a flat dictionary by name: what is trained, sharded and saved."""

import dataclasses

import jax
from flax import nnx

from deltanet_jax.config import ModelConfig
from deltanet_jax.models import LM, build, logical_axes
from deltanet_jax.models.build import abstract


@dataclasses.dataclass(frozen=True)
class Skeleton:
  """A model without its weights, and the axis names of each."""

  graph: nnx.GraphDef
  structure: jax.tree_util.PyTreeDef
  shapes: dict[str, jax.ShapeDtypeStruct]
  axes: dict[str, tuple[str | None, ...]]

  def model(self, weights: dict[str, jax.Array]) -> LM:
    state = jax.tree.unflatten(self.structure, [weights[name] for name in self.shapes])
    return nnx.merge(self.graph, state)


def skeleton(cfg: ModelConfig) -> Skeleton:
  """What there is to know of a model before its weights exist."""
  model = abstract(cfg)
  graph, state = nnx.split(model, nnx.Param)
  axes = {_name(path): names for path, names in logical_axes(model).items()}
  leaves, structure = jax.tree.flatten(state)
  shapes = dict(zip(_names(state), leaves))
  assert shapes.keys() == axes.keys()
  return Skeleton(graph, structure, shapes, axes)


def weights_of(model: LM) -> dict[str, jax.Array]:
  state = nnx.state(model, nnx.Param)
  return dict(zip(_names(state), jax.tree.leaves(state)))


def init_weights(cfg: ModelConfig, seed: int) -> dict[str, jax.Array]:
  return weights_of(build(cfg, seed))


def _names(state) -> list[str]:
  return [_name(path) for path, _ in nnx.to_flat_state(state)]


def _name(path) -> str:
  return ".".join(str(part) for part in path)
