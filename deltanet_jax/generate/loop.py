"""Prefill of prompts, then a compiled loop that draws one token at a time."""

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
  """What the loop carries: as large after many tokens as after one."""

  state: object  # of the model
  token: Int[Array, " B"]  # the last one drawn, not yet seen by the model
  stopped: Array  # [B], whether a row has met a stop token
  key: Array


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
  """Continues each prompt by up to `max_new` tokens; a stop token ends a row and is kept.

  Args:
    prompts: token ids, of unequal lengths if need be: lists or arrays, or one array `[B L]`; one
      list or array of ids alone is one prompt.
    block: tokens per compiled call; ends early once every row has stopped.
  """
  sampling = sampling or Sampling()
  sampling.validate()
  if max_new < 1:
    raise ValueError(f"max_new is {max_new}, expected at least 1 token.")
  prompts = _rows(prompts)
  for id in (*stop, *(int(x) for row in prompts for x in (row.min(), row.max()))):
    if not 0 <= id < model.cfg.vocab:
      raise ValueError(f"token id {id} is outside the vocabulary of {model.cfg.vocab}.")
  tokens, segment_ids = left_pad(prompts)
  # Whole blocks are drawn, and a cache must hold them all.
  blocks = -(-(max_new - 1) // block)
  state = model.init_state(len(prompts), tokens.shape[1] + blocks * block)
  stops = jnp.asarray(list(stop), jnp.int32)
  now = prefill(model, tokens, segment_ids, state, stops, jax.random.key(seed), sampling)
  drawn = [np.asarray(now.token)[:, None]]
  for _ in range(blocks):
    if np.asarray(now.stopped).all():
      break
    now, more = decode(model, now, stops, block, sampling)
    drawn.append(np.asarray(more))
  rows = np.concatenate(drawn, axis=1)[:, :max_new]
  return [_until_stop(row.tolist(), set(stop)) for row in rows]


def _rows(prompts) -> list[np.ndarray]:
  """The ids of each prompt."""
  if np.ndim(prompts) == 0 if hasattr(prompts, "ndim") else not hasattr(prompts, "__len__"):
    raise ValueError(
      f"prompts is {prompts!r}, expected a list of prompts, each a list or an array of token ids."
    )
  if len(prompts) and np.ndim(prompts[0]) == 0:
    prompts = [prompts]
  rows = [np.asarray(prompt) for prompt in prompts]
  if not rows or not all(row.size for row in rows):
    raise ValueError("prompts has an empty entry, expected at least one token in each.")
  for row in rows:
    if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
      raise ValueError(
        f"a prompt is an array {list(row.shape)} of {row.dtype}, expected token ids [L] (integers):"
        " a tokenizer makes them of text."
      )
  return rows


def left_pad(prompts, length: int = 0) -> tuple[Int[Array, "B L"], Int[Array, "B L"]]:
  """Tokens `[B L]`, and ids that make the padding before a prompt a document of its own.

  Args:
    length: L is at least that.
  """
  L = max(length, *(len(prompt) for prompt in prompts))
  tokens, segment_ids = np.zeros((2, len(prompts), L), np.int32)
  for i, prompt in enumerate(prompts):
    tokens[i, L - len(prompt) :] = prompt
    segment_ids[i, L - len(prompt) :] = 1
  return jnp.asarray(tokens), jnp.asarray(segment_ids)


@functools.partial(jax.jit, static_argnames="sampling", donate_argnames="state")
def prefill(model, tokens, segment_ids, state, stops, key, sampling) -> Decoding:
  """Reads the prompts and draws the first token."""
  x, state = model.features(tokens, segment_ids, state)
  key, draw = jax.random.split(key)
  token = sample(model.logits(x[:, -1]), sampling, draw)
  return Decoding(state, token, _is_stop(token, stops), key)


@functools.partial(jax.jit, static_argnames=("count", "sampling"), donate_argnames="now")
def decode(model, now: Decoding, stops, count: int, sampling: Sampling):
  """Draws `count` more tokens: (Decoding, tokens `[B count]`); a stopped row repeats its stop."""

  def one(now, _):
    logits, state = model.step(now.token, now.state)
    key, draw = jax.random.split(now.key)
    token = jnp.where(now.stopped, now.token, sample(logits, sampling, draw))
    return Decoding(state, token, now.stopped | _is_stop(token, stops), key), token

  now, tokens = lax.scan(one, now, length=count)
  return now, tokens.T


def _is_stop(token, stops):
  return (token[:, None] == stops[None, :]).any(axis=1)


def _until_stop(row, stop):
  for i, token in enumerate(row):
    if token in stop:
      return row[: i + 1]
  return row
