"""The training step: loss, gradient, update, as one compiled program over a mesh."""

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
from deltanet_jax.models.abstract import AbstractModel, abstract_model, init_weights
from deltanet_jax.models.chunked_logits import batch_totals, predictions
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.train.optim import make_optimizer

# As `deltanet_jax.data.Batch`, of all hosts together.
Batch = dict[str, Any]
# weights, optimizer: by name; step: updates so far; skipped: of these, those that changed nothing
# because their gradient was not finite; bad: how many such there were in a row just now.
State = dict[str, Any]
# An argument like the learning rate: seeds are one program.
_SEED = jax.ShapeDtypeStruct((), jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The pure functions of one run, initial state, update and score, and how they are split."""

  cfg: TrainConfig
  mesh: Mesh
  abstract_model: AbstractModel
  optimizer: optax.GradientTransformation

  def init(self, seed: int | Array) -> State:
    return self.begin(init_weights(self.cfg.model, seed))

  def begin(self, weights) -> State:
    """The state before the first update of these weights."""
    count = jnp.zeros((), jnp.int32)
    return dict(
      weights=weights,
      optimizer=self.optimizer.init(weights),
      step=count,
      skipped=count,
      bad=count,
    )

  def update(
    self, state: State, batch: Batch, rate: Float[Array, ""]
  ) -> tuple[State, dict[str, Array]]:
    """The state after one batch, and loss, gradient norm, learning rate and the counts.

    Args:
      rate: the learning rate, an argument so that runs that differ in it are one program.
    """
    if self.cfg.model.embedding_dropout:
      batch = batch | dict(dropout=self._dropout_keys(state["step"]))
    loss, grads = self._gradient(state["weights"], batch)
    norm = optax.tree.norm(grads)
    directions, optimizer = self.optimizer.update(grads, state["optimizer"], state["weights"])
    weights = jax.tree.map(lambda w, d: w - rate * d, state["weights"], directions)
    good = jnp.isfinite(norm) & jnp.isfinite(loss)
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    new = dict(
      weights=keep(weights, state["weights"]),
      optimizer=keep(optimizer, state["optimizer"]),
      step=state["step"] + 1,
      skipped=state["skipped"] + jnp.where(good, 0, 1),
      bad=jnp.where(good, 0, state["bad"] + 1),
    )
    metrics = dict(loss=loss, grad_norm=norm, learning_rate=rate)
    return new, metrics | dict(skipped=new["skipped"], bad=new["bad"])

  def _dropout_keys(self, step) -> Array:
    """A key for each row, a function of seed and step: the same for any mesh and micro-batches."""
    # Weights are drawn from the seed itself.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.cfg.seed), 1), step)
    return jax.random.split(key, self.cfg.data.batch)

  def _gradient(self, weights, batch):
    """The mean loss over a batch and its gradient, in `grad_accum` micro-batches."""
    # Each is divided by the whole batch's count: they may hold different numbers of targets.
    count = jnp.maximum(batch["mask"].sum(dtype=jnp.int32), 1).astype(jnp.float32)

    def loss(weights, micro_batch):
      model = self.abstract_model.model(weights)
      return self._totals(model, micro_batch)["loss"] / count

    n = self.cfg.grad_accum
    if n == 1:
      return jax.value_and_grad(loss)(weights, batch)

    def split(x):
      # Rows of one micro-batch lie apart, so that every device has rows in each.
      x = jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)
      return sharding.constrain(x, *(None, "batch", "length")[: x.ndim])

    def add(carry, micro_batch):
      return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(weights, micro_batch)), None

    zero = (jnp.zeros((), accum_dtype(self.cfg.model.dtype)), jax.tree.map(jnp.zeros_like, weights))
    return lax.scan(add, zero, jax.tree.map(split, batch))[0]

  def score(self, weights, batch: Batch) -> dict[str, Array]:
    """Sums over the batch: loss, how many targets were predicted (argmax), targets."""
    return self._totals(self.abstract_model.model(weights), batch, count_correct=True)

  def _totals(self, model, batch, **options):
    cfg = self.cfg
    return batch_totals(model, batch, cfg.loss_chunk, scored=cfg.data.scored, **options)

  def predict(self, weights, batch: Batch, counting: int) -> Array:
    """See `deltanet_jax.models.chunked_logits.predictions`."""
    return predictions(self.abstract_model.model(weights), batch, counting, self.cfg.loss_chunk)

  def state_shapes(self) -> State:
    """The state as shapes with shardings; takes no memory."""
    by_name = {
      name: sharding.named(self.mesh, *axes) for name, axes in self.abstract_model.axes.items()
    }
    whole = NamedSharding(self.mesh, PartitionSpec())

    def place(path, x):
      # The moments of a weight lie where it lies; everything else is a count.
      name = getattr(path[-1], "key", None)
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_name.get(name, whole))

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(self.init, _SEED))

  def batch_shapes(self) -> Batch:
    place = sharding.named(self.mesh, "batch", "length")
    shape = (self.cfg.data.batch, self.cfg.data.length)
    dtypes = dict(tokens="int32", targets="int32", segment_ids="int32", mask="bool")
    return {
      name: jax.ShapeDtypeStruct(shape, jnp.dtype(d), sharding=place) for name, d in dtypes.items()
    }

  def lower(self, function, *arguments, places=None, donate=(), **options):
    """A method of this class for arguments of these shapes; `.compile()` makes it a program.

    Args:
      places: shardings of the results; None has every device hold all of them.
    """
    with jax.set_mesh(self.mesh):
      if places is None:
        whole = NamedSharding(self.mesh, PartitionSpec())
        places = jax.tree.map(lambda _: whole, jax.eval_shape(function, *arguments))
      jitted = jax.jit(function, out_shardings=places, donate_argnums=donate)
      return jitted.trace(*arguments).lower(**options)

  def lower_init(self, **options):
    return self.lower(self.init, _SEED, places=_places(self.state_shapes()), **options)

  def lower_begin(self, **options):
    shapes = self.state_shapes()
    return self.lower(self.begin, shapes["weights"], places=_places(shapes), donate=0, **options)

  def lower_update(self, **options):
    whole = NamedSharding(self.mesh, PartitionSpec())
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    arguments = self.state_shapes(), self.batch_shapes(), rate
    with jax.set_mesh(self.mesh):
      _, metrics = jax.eval_shape(self.update, *arguments)
    places = (_places(arguments[0]), jax.tree.map(lambda _: whole, metrics))
    return self.lower(self.update, *arguments, places=places, donate=0, **options)

  def lower_score(self, **options):
    return self.lower(self.score, self.state_shapes()["weights"], self.batch_shapes(), **options)

  def lower_predict(self, counting: int, **options):
    function = functools.partial(self.predict, counting=counting)
    return self.lower(function, self.state_shapes()["weights"], self.batch_shapes(), **options)


def _places(shapes):
  return jax.tree.map(lambda x: x.sharding, shapes)


def make_trainer(cfg: TrainConfig, devices=None) -> Trainer:
  """Checks the configuration and the mesh against each other; computes nothing."""
  cfg.validate()
  if cfg.model.dtype == "float64" and not jax.config.jax_enable_x64:
    raise ValueError(
      "model.dtype = 'float64' needs jax's 64-bit types: set JAX_ENABLE_X64=1 and start again."
    )
  mesh = sharding.make_mesh(cfg.mesh.sizes(), devices)
  model = abstract_model(cfg.model)
  for name, axes in model.axes.items():
    for axis, size in zip(axes, model.shapes[name].shape):
      sharding.check_divides(mesh, axis, size, f"axis {axis!r} of weight {name}")
  rows = cfg.data.batch // cfg.grad_accum
  sharding.check_divides(mesh, "batch", rows, "data.batch / grad_accum")
  sharding.check_divides(mesh, "length", cfg.data.length, "data.length")
  return Trainer(cfg, mesh, model, make_optimizer(cfg, model.decays))
