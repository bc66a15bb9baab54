"""A model's weights as a flat dictionary by name: what is trained, sharded and saved."""

import dataclasses
import hashlib

import jax
import numpy as np
from flax import nnx

from deltanet_jax.config import ModelConfig
from deltanet_jax.models import LM, build
from deltanet_jax.models.build import abstract


@dataclasses.dataclass(frozen=True)
class AbstractModel:
  """A model without its weights; of each by name its shape, its axes and whether it decays."""

  graph: nnx.GraphDef
  structure: jax.tree_util.PyTreeDef
  shapes: dict[str, jax.ShapeDtypeStruct]
  axes: dict[str, tuple[str | None, ...]]
  decays: dict[str, bool]

  def model(self, weights: dict[str, jax.Array]) -> LM:
    state = jax.tree.unflatten(self.structure, [weights[name] for name in self.shapes])
    return nnx.merge(self.graph, state)


def abstract_model(cfg: ModelConfig) -> AbstractModel:
  """What there is to know of a model before its weights exist."""
  graph, state = nnx.split(abstract(cfg), nnx.Param)
  axes, decays = {}, {}
  for path, weight in nnx.to_flat_state(state):
    facts = weight.get_metadata()
    # The weights of a stack have one axis more than their layer gave them.
    stacked = ("layers",) * (len(weight.shape) - len(facts["axes"]))
    axes[_name(path)] = (*stacked, *facts["axes"])
    decays[_name(path)] = facts["decays"]
  leaves, structure = jax.tree.flatten(state)
  shapes = dict(zip(_names(state), leaves))
  return AbstractModel(graph, structure, shapes, axes, decays)


def weights_of(model: LM) -> dict[str, jax.Array]:
  state = nnx.state(model, nnx.Param)
  return dict(zip(_names(state), jax.tree.leaves(state)))


def init_weights(cfg: ModelConfig, seed: int | jax.Array) -> dict[str, jax.Array]:
  return weights_of(build(cfg, seed))


def put_on_mesh(weights: dict[str, np.ndarray], shapes: dict[str, jax.ShapeDtypeStruct]) -> dict:
  """Weights that every process has whole, split and put where `shapes` wants them."""
  one = lambda x, shape: jax.make_array_from_callback(shape.shape, shape.sharding, x.__getitem__)
  return {name: one(weights[name], shape) for name, shape in shapes.items()}


def digest(weights: dict[str, np.ndarray]) -> str:
  """sha256 of names and numbers: the same for a run, its exports and public copies of it."""
  hashed = hashlib.sha256()
  for name in sorted(weights):
    hashed.update(name.encode())
    hashed.update(np.ascontiguousarray(weights[name]))
  return hashed.hexdigest()


def _names(state) -> list[str]:
  return [_name(path) for path, _ in nnx.to_flat_state(state)]


def _name(path) -> str:
  return ".".join(str(part) for part in path)
