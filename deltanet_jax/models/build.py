"""From a configuration to a model, and what it will cost, told without building it."""

import dataclasses
import math

import jax
from flax import nnx

from deltanet_jax.config import AttentionConfig, ModelConfig
from deltanet_jax.models.lm import LM


def build(cfg: ModelConfig, seed: int = 0) -> LM:
  """The model with random weights."""
  return LM(cfg, rngs=nnx.Rngs(params=seed))


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
  state_expansion: float | None  # the paper's column; None with attention
  flops: float  # forward, per token


def summarize(cfg: ModelConfig, length: int = 2048) -> Summary:
  """Parameters, state and cost, from shapes alone."""
  model = abstract(cfg)
  states = jax.eval_shape(lambda m: m.init_state(1, length), model)
  leaves = jax.tree_util.tree_leaves_with_path(states)
  floating = [(path, x) for path, x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
  recurrent = sum(x.size for path, x in floating if getattr(path[-1], "key", None) == "S")
  attends = any(isinstance(mixer, AttentionConfig) for mixer in cfg.mixers.values())
  # The paper divides by layers and width, counting two blocks without MLP as one layer.
  layers = cfg.depth if cfg.mlp_width else cfg.depth / 2
  parameters = sum(x.size for x in jax.tree.leaves(model))
  products = parameters - (0 if cfg.tied else math.prod(model.embedding.shape))
  mixing = sum(
    stack.times * block.mixer.flops(length) for stack in model.stacks for block in stack.unit.blocks
  )
  return Summary(
    parameters=parameters,
    state=sum(x.size for _, x in floating),
    state_expansion=None if attends else recurrent / (layers * cfg.width),
    flops=2.0 * products + mixing,
  )
