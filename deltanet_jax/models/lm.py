"""The language model: embedding, layers, final norm and output head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from deltanet_jax.config import ModelConfig
from deltanet_jax.mixers import mixer_class
from deltanet_jax.mixers.layers import Linear, normal, param
from deltanet_jax.models.autoencoder import Decoder
from deltanet_jax.models.block import make_norm
from deltanet_jax.models.hgrn2_lower_bounds import LowerBounds
from deltanet_jax.models.stack import Stack, find_repeats
from deltanet_jax.ops.checks import check_segment_ids
from deltanet_jax.ops.matmul import matmul
from deltanet_jax.ops.segments import segment_positions
from deltanet_jax.sharding import constrain


class LM(nnx.Module):
  """Map tokens `[B L]` to logits `[B L V]` of the next tokens (autoencoder: of the same tokens)."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    cfg.validate()
    self.cfg = cfg = dataclasses.replace(cfg)
    self.embedding = param(normal(rngs, (cfg.vocab, cfg.width), cfg.init_std), "vocab", "embed")
    self.embedding_norm = make_norm(cfg) if cfg.embedding_norm else None
    stacks, first = [], 0
    for repeat in find_repeats(cfg.layers):
      stacks.append(Stack(cfg, repeat, first, rngs=rngs))
      first += len(repeat.unit) * repeat.times
    self.stacks = nnx.List(stacks)
    bounded = [mixer_class(cfg.mixers[name].kind).bounded for name in cfg.layers]
    self.bounds = LowerBounds(bounded, cfg.width) if any(bounded) else None
    self.norm = make_norm(cfg)
    head = dict(shape=(cfg.width, cfg.vocab), axes=("embed", "vocab"), bias=cfg.head_bias)
    self.head = None if cfg.tied else Linear(**head, std=cfg.init_std, rngs=rngs)
    self.decoder = Decoder(cfg, rngs=rngs) if cfg.autoencoder else None
    shape = (cfg.positions, cfg.width)
    self.positions = param(normal(rngs, shape, cfg.init_std), None, "embed") if shape[0] else None

  def __call__(
    self, tokens: Int[Array, "B L"], segment_ids: Int[Array, "B L"] | None = None
  ) -> Float[Array, "B L V"]:
    return self.logits(self.features(tokens, segment_ids)[0])

  def features(
    self,
    tokens: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"] | None = None,
    state: Any = None,
    dropout: Key[Array, " B"] | None = None,
  ) -> tuple[Float[Array, "B L D"], Any]:
    """Return the hidden states after the final norm, and the new state (None without one).

    Args:
      state: decoding state before the first token; None starts from zero.
      dropout: random key of the embedding dropout for each sequence; None: no dropout.
    """
    check_tokens(tokens, "BL", self.cfg.vocab)
    check_segment_ids(segment_ids, np.shape(tokens))
    if state is not None:
      self._check_decodes()
    # Gather from a replicated table: the compiler partitions a gather from a sharded one badly. And
    # in float32: the gradient of an embedding sums over all its occurrences.
    x = constrain(self.embedding[...], None, None)[tokens]
    if self.positions is not None:
      start = jnp.zeros(x.shape[:1], jnp.int32) if state is None else state[-1]
      positions = segment_positions(start, x.shape[1], segment_ids)
      x = x + self._position_embeddings(positions)
    x = constrain(x.astype(self.cfg.dtype), "batch", "length", None)
    if dropout is not None:
      keep_rate = 1 - self.cfg.embedding_dropout
      keep = jax.vmap(lambda key: jax.random.bernoulli(key, keep_rate, x.shape[1:]))(dropout)
      x = jnp.where(keep, x / jnp.asarray(keep_rate, x.dtype), 0)
    if self.embedding_norm is not None:
      x = self.embedding_norm(x)
    new = []
    for i, (stack, bounds) in enumerate(zip(self.stacks, self._bounds())):
      x, after = stack(x, segment_ids, None if state is None else state[i], bounds)
      new.append(after)
    if self.positions is not None:
      new.append(positions[:, -1] + 1)
    if self.decoder is not None:
      x = self.decoder(x)
    return self.norm(x), None if state is None else new

  def _position_embeddings(self, positions):
    length = positions.shape[1]
    if length > self.cfg.positions:
      raise ValueError(
        f"the sequence length is {length}, but the model has {self.cfg.positions} learned position"
        " embeddings."
      )
    # NaN if decoding exceeds them: inside a compiled step this cannot raise.
    return constrain(self.positions[...], None, None).at[positions].get(mode="fill")

  def _check_decodes(self):
    if self.decoder is not None:
      raise ValueError(
        "an autoencoder predicts a sequence from its last hidden state and cannot decode: use a"
        " model with autoencoder=0."
      )

  def _bounds(self) -> list[list[Array | None]]:
    """Return the lower bounds of the decay for each block of each stack."""
    units = [(len(stack.names), stack.times) for stack in self.stacks]
    if self.bounds is None:
      return [[None] * size for size, _ in units]
    return self.bounds(units)

  def logits(
    self, x: Float[Array, "*b D"], kernel: Float[Array, "D V"] | None = None
  ) -> Float[Array, "*b V"]:
    """Return the logits of hidden states; `kernel` is `head_kernel()` if already computed."""
    logits = matmul(x, self.head_kernel() if kernel is None else kernel, True)
    if self.cfg.head_bias:
      bias = self.head.bias[...].astype(logits.dtype)
      logits = logits + bias.reshape((1,) * (logits.ndim - 1) + bias.shape)
    cap = self.cfg.logit_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)

  def head_kernel(self) -> Float[Array, "D V"]:
    """Return the weights of the output head, replicated except for a sharded vocabulary."""
    kernel = self.embedding[...].T if self.head is None else self.head.kernel[...]
    return constrain(kernel, None, "vocab")

  def init_state(self, batch: int, max_length: int) -> Any:
    """Return the decoding state before the first token.

    Args:
      max_length: maximum sequence length; the size of attention caches.
    """
    self._check_decodes()
    dtype = jnp.dtype(self.cfg.dtype)
    states = [stack.init_state(batch, max_length, dtype) for stack in self.stacks]
    return states if self.positions is None else [*states, jnp.zeros((batch,), jnp.int32)]

  def prefill(
    self, tokens: Int[Array, "B L"], state: Any, segment_ids: Int[Array, "B L"] | None = None
  ) -> tuple[Float[Array, "B L V"], Any]:
    """Continue from `state` with several tokens at once; return logits and the new state."""
    x, state = self.features(tokens, segment_ids, state)
    return self.logits(x), state

  def step(self, tokens: Int[Array, " B"], state: Any) -> tuple[Float[Array, "B V"], Any]:
    """Decode one token: return logits and the new state."""
    check_tokens(tokens, "B", self.cfg.vocab)
    x, state = self.features(tokens[:, None], None, state)
    return self.logits(x[:, 0]), state


def check_tokens(tokens, axes: str, vocab: int):
  """Raise ValueError for a wrong shape or dtype, and for ids outside the vocabulary.

  Ids are checked only where they are concrete, not traced: JAX clamps an index outside the table,
  which would return finite logits of another token.
  """
  shape, dtype = np.shape(tokens), getattr(tokens, "dtype", type(tokens))
  if len(shape) != len(axes) or 0 in shape:
    least = f"{' and '.join(axes)} of at least 1"
    raise ValueError(f"tokens has shape {list(shape)}, expected [{' '.join(axes)}], {least}.")
  if not isinstance(dtype, np.dtype) or not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(f"tokens has dtype {dtype}, expected an array of integers.")
  if isinstance(tokens, jax.core.Tracer) or not getattr(tokens, "is_fully_addressable", True):
    return
  ids = np.asarray(tokens)
  if wrong := ids[(ids < 0) | (ids >= vocab)].tolist():
    raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {vocab}.")
