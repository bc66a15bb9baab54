"""Build a model from its configuration; compute parameters, state size and FLOPs from shapes."""

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
  """Return the model with random weights; the seed may be traced, for instance under `vmap`."""
  return LM(cfg, rngs=nnx.Rngs(params=jax.random.key(seed)))


def abstract(cfg: ModelConfig) -> LM:
  """Return the model with shapes instead of weights; allocates nothing."""
  return jax.eval_shape(lambda: build(cfg))


def count_parameters(cfg: ModelConfig) -> int:
  """Return the number of parameters, from shapes alone."""
  return _parameters(abstract(cfg))


def _parameters(model: LM) -> int:
  return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@dataclasses.dataclass(frozen=True)
class Summary:
  """Size and cost of a model for one sequence."""

  parameters: int
  state: int  # numbers in the decoding state of all layers, including convolution states
  state_expansion: float | None  # as in the paper; None if a state grows with the sequence
  flops: float  # forward FLOPs per token
  operator_flops: dict[str, float]  # those of mixers without weight matmuls, by operator


def summarize(cfg: ModelConfig, length: int = 2048) -> Summary:
  """Return parameters, state size and FLOPs, from shapes alone.

  Args:
    length: sequence length for FLOPs and for the size of attention caches.
  """
  model = abstract(cfg)
  # An autoencoder does not decode.
  init = lambda model: [] if cfg.autoencoder else model.init_state(1, length)
  states = jax.tree.leaves(jax.eval_shape(init, model))
  mixers = [
    block.mixer for stack in model.stacks for block in stack.unit.blocks for _ in range(stack.times)
  ]
  recurrent = [mixer.recurrent_state() for mixer in mixers]
  # As in the paper: divided by layers and width, and two blocks without MLP count as one layer.
  layers = cfg.depth if cfg.has_mlp else cfg.depth / 2
  parameters = _parameters(model)
  matmul_parameters = parameters - (0 if cfg.tied else math.prod(model.embedding.shape))
  operator_flops = collections.Counter()
  for mixer in mixers:
    operator_flops[mixer.operator] += float(mixer.flops(length))
  return Summary(
    parameters=parameters,
    state=sum(x.size for x in states if jnp.issubdtype(x.dtype, jnp.floating)),
    state_expansion=None if None in recurrent else sum(recurrent) / (layers * cfg.width),
    flops=2.0 * matmul_parameters + sum(operator_flops.values()),
    operator_flops=dict(operator_flops),
  )
