"""What every mixer offers, and what settings of several mixers are checked for."""

import abc
from typing import Any, ClassVar, NamedTuple

from flax import nnx
from jaxtyping import Array, Float, Int

from deltanet_jax.config import MixerConfig, check
from deltanet_jax.ops.delta_rule import DELTA_RULE


class Layer(NamedTuple):
  """Which layer of a model a mixer is in; the index may be traced."""

  index: int | Int[Array, ""] = 0
  depth: int = 1


ONLY_LAYER = Layer()


class Mixer(nnx.Module, abc.ABC):
  """Maps x `[B L D]` to y `[B L D]`, causally: `Mixer(cfg, width, rngs=rngs)`.

  A state is a pytree that holds all a mixer remembers of earlier tokens; the numbers that the
  paper counts as recurrent state are under the name "S". It belongs to the first segment of a
  row, the returned one to the last.
  """

  Config: ClassVar[type[MixerConfig]]
  # As the paper's table of linear transformers writes them.
  recurrence: ClassVar[str]
  readout: ClassVar[str]
  # The operator it runs on, how that computes a whole sequence, and what runs it on accelerators.
  engine: ClassVar[str]
  efficient_form: ClassVar[str]
  kernels: ClassVar[str] = "plain XLA"
  # What is kept for decoding: a "state" of one size, a "cache" of keys and values, or the "history"
  # of inputs.
  decode: ClassVar[str] = "state"
  # Entries of the state that `mix` may be given as a `LayerState`, and then returns as one.
  in_place: ClassVar[tuple[str, ...]] = ()
  # Whether initial weights depend on the layer; the constructor then takes `layer`, a `Layer`.
  by_layer: ClassVar[bool] = False
  # Whether `mix` takes `lower_bound` [D] of its decay, which the model learns for all layers.
  bounded: ClassVar[bool] = False

  @abc.abstractmethod
  def init_state(self, batch: int, max_length: int, dtype) -> Any:
    """The state before any token; `max_length` bounds the tokens of a row, attention's cache."""

  @abc.abstractmethod
  def mix(self, x, segment_ids, state) -> tuple[Array, Any]:
    """(y, state); without a state it starts from nothing and returns None for it."""

  @abc.abstractmethod
  def flops(self, length: int) -> float:
    """Floating point operations per token, forward, beyond those of the weights."""

  @abc.abstractmethod
  def recurrent_state(self) -> int | None:
    """Numbers of "S" for one sequence; None if the state grows with the sequence."""

  def __call__(
    self, x: Float[Array, "B L D"], segment_ids: Int[Array, "B L"] | None = None
  ) -> Float[Array, "B L D"]:
    return self.mix(x, segment_ids, None)[0]

  def step(self, x_t: Float[Array, "B D"], state: Any) -> tuple[Float[Array, "B D"], Any]:
    """Goes on by one token."""
    y, state = self.mix(x_t[:, None], None, state)
    return y[:, 0], state


def check_conv(conv: int):
  check(conv == 0 or conv > 1, f"conv is {conv!r}, expected a width above 1, or 0 for none.")


def check_implementation(implementation: str | None):
  DELTA_RULE.check_name(implementation)
