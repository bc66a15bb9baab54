"""What every mixer offers."""

import abc
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int


class Mixer(nnx.Module, abc.ABC):
  """Maps x `[B L D]` to y `[B L D]`, causally.

  A state is a pytree that holds all a mixer remembers of earlier tokens; the numbers that the
  paper counts as recurrent state are under the name "S". It belongs to the first document of a
  row, the returned one to the last.
  """

  # Entries of the state that `mix` may be given as a `Slot`, and then returns as one.
  in_place: tuple[str, ...] = ()

  @abc.abstractmethod
  def init_state(self, batch: int, max_length: int, dtype) -> Any:
    """The state before any token; `max_length` bounds the tokens of a row, attention's cache."""

  @abc.abstractmethod
  def mix(self, x, segment_ids, state) -> tuple[Array, Any]:
    """(y, state); without a state it starts from nothing and returns None for it."""

  @abc.abstractmethod
  def flops(self, length: int) -> float:
    """Floating point operations per token, forward, beyond those of the weights."""

  def __call__(
    self, x: Float[Array, "B L D"], segment_ids: Int[Array, "B L"] | None = None
  ) -> Float[Array, "B L D"]:
    return self.mix(x, segment_ids, None)[0]

  def prefill(
    self, x: Float[Array, "B L D"], state: Any, segment_ids: Int[Array, "B L"] | None = None
  ) -> tuple[Float[Array, "B L D"], Any]:
    """Goes on from `state` over many tokens at once."""
    return self.mix(x, segment_ids, state)

  def step(self, x_t: Float[Array, "B D"], state: Any) -> tuple[Float[Array, "B D"], Any]:
    """Goes on by one token."""
    y, state = self.mix(x_t[:, None], None, state)
    return y[:, 0], state
