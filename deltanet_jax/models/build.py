"""From a configuration to a model, and what it will cost, told without building it."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from deltanet_jax.config import ModelConfig
from deltanet_jax.models.lm import LM


def build(cfg: ModelConfig, seed: int | Array = 0) -> LM:
  """The model with random weights; the seed may be traced, for instance one of a `vmap`."""
  return LM(cfg, rngs=nnx.Rngs(params=jax.random.key(seed)))


def abstract(cfg: ModelConfig) -> LM:
  """The model with shapes in place of weights; takes no memory."""
  return jax.eval_shape(lambda: build(cfg))


def count_parameters(cfg: ModelConfig) -> int:
  return sum(x.size for x in jax.tree.leaves(abstract(cfg)))


@dataclasses.dataclass(frozen=True)
class Summary:
  """Sizes of a model for one sequence; `length` is that of training and of attention's cache."""

  parameters: int
  state: int  # numbers kept while decoding, all layers, convolutions included
  state_expansion: float | None  # the paper's column; None where a state grows with the sequence
  flops: float  # forward, per token
  operator_flops: dict[str, float]  # of these the mixers' beyond their weights, by operator


def summarize(cfg: ModelConfig, length: int = 2048) -> Summary:
  """Parameters, state and cost, from shapes alone."""
  model = abstract(cfg)
  # An autoencoder decodes nothing, so it keeps nothing.
  init = lambda model: [] if cfg.autoencoder else model.init_state(1, length)
  states = jax.tree.leaves(jax.eval_shape(init, model))
  mixers = [
    block.mixer for stack in model.stacks for block in stack.unit.blocks for _ in range(stack.times)
  ]
  recurrent = [mixer.recurrent_state() for mixer in mixers]
  # The paper divides by layers and width, counting two blocks without MLP as one layer.
  layers = cfg.depth if cfg.has_mlp else cfg.depth / 2
  parameters = sum(x.size for x in jax.tree.leaves(model))
  products = parameters - (0 if cfg.tied else math.prod(model.embedding.shape))
  operator_flops = collections.Counter()
  for mixer in mixers:
    operator_flops[mixer.operator] += float(mixer.flops(length))
  return Summary(
    parameters=parameters,
    state=sum(x.size for x in states if jnp.issubdtype(x.dtype, jnp.floating)),
    state_expansion=None if None in recurrent else sum(recurrent) / (layers * cfg.width),
    flops=2.0 * products + sum(operator_flops.values()),
    operator_flops=dict(operator_flops),
  )
