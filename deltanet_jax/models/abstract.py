"""A model's structure without its weights, and the weights as a flat dictionary by name.

Training, checkpoints, sharding and evaluation all work on this dictionary. The graph definition and
the shapes in `AbstractModel` turn it back into an `LM`.
"""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Key

from deltanet_jax import sharding
from deltanet_jax.config import ModelConfig
from deltanet_jax.models.build import abstract, build
from deltanet_jax.models.lm import LM


@dataclasses.dataclass(frozen=True)
class AbstractModel:
  """Graph definition of a model and, by weight name, shape, axis names and weight-decay flag."""

  graph: nnx.GraphDef
  structure: jax.tree_util.PyTreeDef
  shapes: dict[str, jax.ShapeDtypeStruct]
  axes: dict[str, tuple[str | None, ...]]
  decays: dict[str, bool]
  rng_state: (
    Any  # an nnx.State of shapes; empty unless a module such as nnx.Dropout draws random numbers
  )

  def model(self, weights: dict[str, jax.Array], key: Key[Array, ""] | None = None) -> LM:
    """Return the model with these weights.

    Args:
      key: seeds modules that draw random numbers and sets training mode (`nnx.Module.train`); None
        sets evaluation mode (`nnx.Module.eval`), in which `nnx.Dropout` does nothing.
    """
    state = jax.tree.unflatten(self.structure, [weights[name] for name in self.shapes])
    model = nnx.merge(self.graph, state, self._seeded(jax.random.key(0) if key is None else key))
    (model.eval if key is None else model.train)()
    return model

  def _seeded(self, key):
    """Return the state of the random number generators: a key each, counts of zero."""
    shapes, structure = jax.tree.flatten(self.rng_state)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    one = lambda i, x: jax.random.split(jax.random.fold_in(key, i), x.shape)
    leaves = [one(i, x) if is_key(x) else jnp.zeros_like(x) for i, x in enumerate(shapes)]
    return jax.tree.unflatten(structure, leaves)

  def sharded_shapes(self, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of every weight with its sharding over the mesh."""
    return {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.named(mesh, *self.axes[name]))
      for name, x in self.shapes.items()
    }

  def check_mesh(self, mesh: Mesh):
    """Raise ValueError if the mesh does not divide a sharded axis of a weight."""
    for name, axes in self.axes.items():
      for axis, size in zip(axes, self.shapes[name].shape):
        sharding.check_divides(mesh, axis, size, f"axis {axis!r} of weight {name}")


def abstract_model(cfg: ModelConfig) -> AbstractModel:
  """Trace a model's construction to its graph definition and shapes; allocates no weights.

  Raises:
    ValueError: a module has a variable that is neither a weight nor the state of a random number
      generator.
  """
  graph, state, rng_state, others = nnx.split(abstract(cfg), nnx.Param, nnx.RngState, ...)
  for path, variable in nnx.to_flat_state(others):
    raise ValueError(
      f"{_name(path)} is an nnx.{type(variable).__name__}, which training would not keep: use"
      " nnx.Param for weights; state of a sequence belongs to the mixer's decoding state."
    )
  axes, decays = {}, {}
  for path, weight in nnx.to_flat_state(state):
    metadata = weight.get_metadata()
    # Stacked weights have one leading axis more than their layer declared.
    stacked = ("layers",) * (len(weight.shape) - len(metadata["axes"]))
    axes[_name(path)] = (*stacked, *metadata["axes"])
    decays[_name(path)] = metadata["decays"]
  leaves, structure = jax.tree.flatten(state)
  shapes = dict(zip(_names(state), leaves))
  return AbstractModel(graph, structure, shapes, axes, decays, rng_state)


def check_dtype(cfg: ModelConfig):
  """Raise ValueError for float64 without JAX's 64-bit types, which JAX would truncate."""
  if cfg.dtype == "float64" and not jax.config.jax_enable_x64:
    raise ValueError(
      "model.dtype = 'float64' needs JAX's 64-bit types: set JAX_ENABLE_X64=1 and start again."
    )


def weights_of(model: LM) -> dict[str, jax.Array]:
  """Return the weights of a model by name."""
  state = nnx.state(model, nnx.Param)
  return dict(zip(_names(state), jax.tree.leaves(state)))


def init_weights(cfg: ModelConfig, seed: int | jax.Array) -> dict[str, jax.Array]:
  """Return randomly initialized weights by name."""
  return weights_of(build(cfg, seed))


def put_on_mesh(weights: dict[str, np.ndarray], shapes: dict[str, jax.ShapeDtypeStruct]) -> dict:
  """Shard weights, of which every process has a full copy, as given by `shapes`."""
  one = lambda x, shape: jax.make_array_from_callback(shape.shape, shape.sharding, x.__getitem__)
  return {name: one(weights[name], shape) for name, shape in shapes.items()}


def digest(weights: dict[str, np.ndarray]) -> str:
  """Return the sha256 of names and values, equal for a run, its exports and public copies of it."""
  hashed = hashlib.sha256()
  for name in sorted(weights):
    hashed.update(name.encode())
    hashed.update(np.ascontiguousarray(weights[name]))
  return hashed.hexdigest()


def _names(state) -> list[str]:
  return [_name(path) for path, _ in nnx.to_flat_state(state)]


def _name(path) -> str:
  return ".".join(str(part) for part in path)
