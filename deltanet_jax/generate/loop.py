"""Text generation: prefill of the prompts, then a compiled decoding loop."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from deltanet_jax.generate.sample import Sampling, sample
from deltanet_jax.models import LM


class Decoding(NamedTuple):
  """Carry of the decoding loop; its size does not depend on the number of generated tokens."""

  state: object  # recurrent state (or KV cache) of the model
  token: Int[Array, " B"]  # the last sampled token, not yet fed to the model
  stopped: Array  # [B], whether a sequence has reached a stop token
  key: Array  # PRNG key


def generate(
  model: LM,
  prompts: Sequence | np.ndarray | Array,
  max_new: int,
  *,
  sampling: Sampling | None = None,
  stop: Sequence[int] = (),
  seed: int = 0,
  block: int = 64,
) -> list[list[int]]:
  """Generate up to `max_new` tokens after each prompt.

  Args:
    model: The language model.
    prompts: Token ids: lists or arrays, possibly of different lengths, or one array `[B L]`. A flat
      list or array of ids is a single prompt.
    max_new: Maximum number of new tokens per prompt.
    sampling: Temperature, top-k and top-p; greedy by default.
    stop: Stop tokens: a sequence ends after the first one, which is included.
    seed: Seed of the sampling.
    block: Tokens per compiled call; generation ends early once all sequences have stopped.

  Returns:
    The new tokens of each prompt.
  """
  sampling = sampling or Sampling()
  sampling.validate()
  if max_new < 1:
    raise ValueError(f"max_new is {max_new}, expected at least 1 token.")
  prompts = _as_arrays(prompts)
  for id in (*stop, *(int(x) for ids in prompts for x in (ids.min(), ids.max()))):
    if not 0 <= id < model.cfg.vocab:
      raise ValueError(f"token id {id} is outside the vocabulary of {model.cfg.vocab}.")
  tokens, segment_ids = left_pad(prompts)
  # Full blocks are sampled, and a KV cache must have slots for all of them.
  blocks = -(-(max_new - 1) // block)
  state = model.init_state(len(prompts), tokens.shape[1] + blocks * block)
  stops = jnp.asarray(list(stop), jnp.int32)
  carry = prefill(model, tokens, segment_ids, state, stops, jax.random.key(seed), sampling)
  sampled = [np.asarray(carry.token)[:, None]]
  for _ in range(blocks):
    if np.asarray(carry.stopped).all():
      break
    carry, more = decode(model, carry, stops, block, sampling)
    sampled.append(np.asarray(more))
  sequences = np.concatenate(sampled, axis=1)[:, :max_new]
  return [_until_stop(ids.tolist(), set(stop)) for ids in sequences]


def _as_arrays(prompts) -> list[np.ndarray]:
  """Validate the prompts; return the ids of each."""
  if np.ndim(prompts) == 0 if hasattr(prompts, "ndim") else not hasattr(prompts, "__len__"):
    raise ValueError(
      f"prompts is {prompts!r}, expected a list of prompts, each a list or an array of token ids."
    )
  if len(prompts) and np.ndim(prompts[0]) == 0:
    prompts = [prompts]
  arrays = [np.asarray(prompt) for prompt in prompts]
  if not arrays or not all(ids.size for ids in arrays):
    raise ValueError("prompts has an empty entry, expected at least one token in each.")
  for ids in arrays:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
      raise ValueError(
        f"a prompt is an array {list(ids.shape)} of {ids.dtype}, expected token ids [L] (integers):"
        " encode text with a tokenizer."
      )
  return arrays


def left_pad(prompts, length: int = 0) -> tuple[Int[Array, "B L"], Int[Array, "B L"]]:
  """Pad prompts on the left; return tokens and segment_ids, in which padding is its own segment.

  Args:
    prompts: Token ids of each prompt.
    length: Minimum of L.
  """
  L = max(length, *(len(prompt) for prompt in prompts))
  tokens, segment_ids = np.zeros((2, len(prompts), L), np.int32)
  for i, prompt in enumerate(prompts):
    tokens[i, L - len(prompt) :] = prompt
    segment_ids[i, L - len(prompt) :] = 1
  return jnp.asarray(tokens), jnp.asarray(segment_ids)


@functools.partial(jax.jit, static_argnames="sampling", donate_argnames="state")
def prefill(model, tokens, segment_ids, state, stops, key, sampling) -> Decoding:
  """Feed the prompts to the model and sample the first token."""
  x, state = model.features(tokens, segment_ids, state)
  key, draw = jax.random.split(key)
  token = sample(model.logits(x[:, -1]), sampling, draw)
  return Decoding(state, token, _is_stop(token, stops), key)


@functools.partial(jax.jit, static_argnames=("count", "sampling"), donate_argnames="carry")
def decode(model, carry: Decoding, stops, count: int, sampling: Sampling):
  """Sample `count` more tokens; a stopped sequence repeats its stop token.

  Returns:
    The new carry, and tokens `[B count]`.
  """

  def one(carry, _):
    logits, state = model.step(carry.token, carry.state)
    key, draw = jax.random.split(carry.key)
    token = jnp.where(carry.stopped, carry.token, sample(logits, sampling, draw))
    return Decoding(state, token, carry.stopped | _is_stop(token, stops), key), token

  carry, tokens = lax.scan(one, carry, length=count)
  return carry, tokens.T


def _is_stop(token, stops):
  return (token[:, None] == stops[None, :]).any(axis=1)


def _until_stop(ids, stop):
  for i, token in enumerate(ids):
    if token in stop:
      return ids[: i + 1]
  return ids
