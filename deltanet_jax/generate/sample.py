"""Choosing the next token from logits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How the next token is drawn; the default is greedy."""

  temperature: float = 0.0  # 0 takes the most likely token
  top_k: int | None = None  # only the k most likely tokens
  top_p: float | None = None  # only the fewest tokens that hold this much probability

  def validate(self):
    if not 0 <= self.temperature < math.inf:
      raise ValueError(f"temperature is {self.temperature}, expected 0 or more.")
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(f"top_k is {self.top_k}, expected at least 1.")
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}, expected a probability above 0, at most 1.")
    for name in ("top_k", "top_p"):
      value = getattr(self, name)
      if self.temperature == 0 and value is not None:
        raise ValueError(
          f"{name} is {value}, but temperature 0 always takes the most likely token: set a"
          f" temperature, for instance 0.8, or leave {name} out."
        )


def sample(logits: Float[Array, "B V"], how: Sampling, key) -> Int[Array, " B"]:
  """One token per row; top_k is applied before top_p, both after the temperature."""
  how.validate()
  if how.temperature == 0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits / how.temperature
  if how.top_k is not None and how.top_k < logits.shape[1]:
    least = jax.lax.top_k(logits, how.top_k)[0][:, -1:]
    logits = jnp.where(logits >= least, logits, -jnp.inf)
  if how.top_p is not None and how.top_p < 1:
    ordered = -jnp.sort(-logits, axis=-1)
    p = jax.nn.softmax(ordered, axis=-1)
    # A token counts if those before it do not yet hold top_p; the first always does.
    counts = jnp.cumsum(p, axis=-1) - p < how.top_p
    least = jnp.min(jnp.where(counts, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits >= least, logits, -jnp.inf)
  return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
