"""The training step: loss, gradient and optimizer update as one compiled function over a mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from deltanet_jax import sharding
from deltanet_jax.config import TrainConfig
from deltanet_jax.eval.evaluation import Evaluation, lower_on_mesh
from deltanet_jax.models.abstract import (
  AbstractModel,
  abstract_model,
  check_dtype,
  init_weights,
)
from deltanet_jax.models.chunked_logits import batch_totals
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.train.optim import make_optimizer

# As `deltanet_jax.data.Batch`, with the sequences of all processes.
Batch = dict[str, Any]
# weights and optimizer: by weight name; step: number of updates; skipped: how many of them changed
# nothing because loss or gradient was non-finite; bad: how many of the most recent, consecutively.
State = dict[str, Any]
# A traced argument, so that seeds share one compiled function.
_SEED = jax.ShapeDtypeStruct((), jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Pure functions of one run (initial state, gradient, update) and their shardings."""

  cfg: TrainConfig
  optimizer: optax.GradientTransformationExtraArgs
  evaluation: Evaluation  # of batches of the training shape
  own_optimizer: bool = False  # `optimizer` is the user's and applies its own learning rate

  @property
  def mesh(self) -> Mesh:
    return self.evaluation.mesh

  @property
  def abstract_model(self) -> AbstractModel:
    return self.evaluation.model

  def init(self, seed: int | Array) -> State:
    """Return the state at step 0 with random weights."""
    return self.init_from(init_weights(self.cfg.model, seed))

  def init_from(self, weights) -> State:
    """Return the state at step 0 with these weights."""
    zero = jnp.zeros((), jnp.int32)
    return dict(
      weights=weights,
      optimizer=self.optimizer.init(weights),
      step=zero,
      skipped=zero,
      bad=zero,
    )

  def update(
    self, state: State, batch: Batch, rate: Float[Array, ""]
  ) -> tuple[State, dict[str, Array]]:
    """Return the state after one update, and loss, gradient norm, learning rate and counts.

    An update with a non-finite loss or gradient leaves weights and optimizer unchanged.

    Args:
      rate: the learning rate, traced, so that learning rates share one compiled function; unused
        with the user's own optimizer, which has its own.
    """
    loss, grads = self.loss_and_gradient(state["weights"], batch, state["step"])
    norm = optax.tree.norm(grads)
    old = state["optimizer"], state["weights"]
    if self.own_optimizer:
      changes, optimizer = self.optimizer.update(grads, *old, value=loss)
      weights = optax.apply_updates(state["weights"], changes)
    else:
      directions, optimizer = self.optimizer.update(grads, *old)
      weights = jax.tree.map(lambda w, d: w - rate * d, state["weights"], directions)
    good = jnp.isfinite(norm) & jnp.isfinite(loss)
    select = functools.partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    new = dict(
      weights=select(weights, state["weights"]),
      optimizer=select(optimizer, state["optimizer"]),
      step=state["step"] + 1,
      skipped=state["skipped"] + jnp.where(good, 0, 1),
      bad=jnp.where(good, 0, state["bad"] + 1),
    )
    metrics = dict(loss=loss, grad_norm=norm)
    if not self.own_optimizer:
      metrics["learning_rate"] = rate
    return new, metrics | dict(skipped=new["skipped"], bad=new["bad"])

  def dropout_keys(self, step: int | Array) -> Array:
    """Return a PRNG key per sequence, by seed and step; independent of mesh and `grad_accum`."""
    return jax.random.split(self._key(1, step), self.cfg.data.batch)

  def _key(self, use: int, step: int | Array) -> Array:
    # A number per use: initialization has the key of the seed itself.
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.cfg.seed), use), step)

  def loss_and_gradient(
    self, weights: dict[str, Array], batch: Batch, step: int | Array
  ) -> tuple[Array, dict[str, Array]]:
    """Return the mean loss over a batch and its gradient, in `grad_accum` micro-batches.

    Args:
      step: seeds dropout. Modules of the user's that draw random numbers, such as `nnx.Dropout`,
        draw by seed, step and micro-batch.
    """
    if self.cfg.model.embedding_dropout:
      batch = batch | dict(dropout=self.dropout_keys(step))
    # Normalized by the count of the full batch: micro-batches may differ in their targets.
    count = jnp.maximum(batch["mask"].sum(dtype=jnp.int32), 1).astype(jnp.float32)

    def loss(weights, micro_batch, index):
      key = jax.random.fold_in(self._key(2, step), index)
      model = self.abstract_model.model(weights, key)
      totals = batch_totals(model, micro_batch, self.cfg.loss_chunk, scored=self.cfg.data.scored)
      return totals["loss"] / count

    n = self.cfg.grad_accum
    if n == 1:
      return jax.value_and_grad(loss)(weights, batch, 0)

    def split(x):
      # A micro-batch takes every n-th sequence, so that every device has sequences in each.
      x = jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)
      return sharding.constrain(x, *(None, "batch", "length")[: x.ndim])

    def add(carry, micro_batch):
      return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(weights, *micro_batch)), None

    zero = (jnp.zeros((), accum_dtype(self.cfg.model.dtype)), jax.tree.map(jnp.zeros_like, weights))
    return lax.scan(add, zero, (jax.tree.map(split, batch), jnp.arange(n)))[0]

  def state_shapes(self) -> State:
    """Return shapes and shardings of the state; allocates nothing."""
    weights = self.evaluation.weight_shapes
    replicated = NamedSharding(self.mesh, PartitionSpec())

    def shape(path, x):
      # Moments are sharded like their weight. Everything else is small: counts, factored moments.
      weight = weights.get(getattr(path[-1], "key", None))
      placed = weight.sharding if weight is not None and weight.shape == x.shape else replicated
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

    return jax.tree_util.tree_map_with_path(shape, jax.eval_shape(self.init_from, weights))

  def own_optimizer_structure(self) -> dict[str, str] | None:
    """Return shapes by path of the state of the user's own optimizer; None without one.

    The state tells most optimizers apart; their hyperparameters are functions and cannot be
    compared.
    """
    if not self.own_optimizer:
      return None
    leaves = jax.tree_util.tree_leaves_with_path(self.state_shapes()["optimizer"])
    return {
      jax.tree_util.keystr(path): f"{x.dtype}[{','.join(map(str, x.shape))}]" for path, x in leaves
    }

  def batch_shapes(self) -> Batch:
    """Return shapes and shardings of a batch."""
    return self.evaluation.batch_shapes

  def lower_init(self, **options) -> jax.stages.Lowered:
    """Lower `init`; options are those of `jax.stages.Traced.lower`."""
    out = _shardings(self.state_shapes())
    return lower_on_mesh(self.mesh, self.init, _SEED, out_shardings=out, **options)

  def lower_init_from(self, **options) -> jax.stages.Lowered:
    """Lower `init_from`, which donates the weights."""
    shapes = self.state_shapes()
    return lower_on_mesh(
      self.mesh,
      self.init_from,
      shapes["weights"],
      out_shardings=_shardings(shapes),
      donate=0,
      **options,
    )

  def lower_update(self, **options) -> jax.stages.Lowered:
    """Lower `update`, which donates the state."""
    replicated = NamedSharding(self.mesh, PartitionSpec())
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    arguments = self.state_shapes(), self.batch_shapes(), rate
    with jax.set_mesh(self.mesh):
      _, metrics = jax.eval_shape(self.update, *arguments)
    out = (_shardings(arguments[0]), jax.tree.map(lambda _: replicated, metrics))
    return lower_on_mesh(self.mesh, self.update, *arguments, out_shardings=out, donate=0, **options)


def _shardings(shapes):
  return jax.tree.map(lambda x: x.sharding, shapes)


def make_trainer(
  cfg: TrainConfig, devices=None, *, optimizer: optax.GradientTransformation | None = None
) -> Trainer:
  """Trace the model and check config and mesh; compiles nothing.

  Args:
    devices: of the mesh; None: all.
    optimizer: used instead of that of `cfg.optimizer`; see `train`.

  Raises:
    ValueError: the config is invalid, or does not fit the mesh.
  """
  cfg.validate()
  if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
    raise ValueError(
      f"optimizer is {optimizer!r}, expected an optax.GradientTransformation such as"
      " optax.adamw(1e-3)."
    )
  check_dtype(cfg.model)
  mesh = sharding.make_mesh(cfg.mesh.sizes(), devices)
  model = abstract_model(cfg.model)
  model.check_mesh(mesh)
  micro_batch = cfg.data.batch // cfg.grad_accum
  sharding.check_divides(mesh, "batch", micro_batch, "data.batch / grad_accum")
  sharding.check_divides(mesh, "length", cfg.data.length, "data.length")
  evaluation = Evaluation(
    model,
    mesh,
    batch=cfg.data.batch,
    length=cfg.data.length,
    max_targets=cfg.data.scored,
    loss_chunk=cfg.loss_chunk,
  )
  own = optimizer is not None
  chosen = optax.with_extra_args_support(optimizer if own else make_optimizer(cfg, model))
  return Trainer(cfg, chosen, evaluation, own)
