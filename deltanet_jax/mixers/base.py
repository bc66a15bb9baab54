"""Interface of all mixers, and validation that their configs share."""

import abc
from typing import Any, ClassVar, NamedTuple

from flax import nnx
from jaxtyping import Array, Float, Int

from deltanet_jax.config import MixerConfig, check
from deltanet_jax.ops.delta_rule import DELTA_RULE


class Layer(NamedTuple):
  """Layer index of a mixer and depth of the model; the index may be traced."""

  index: int | Int[Array, ""] = 0
  depth: int = 1


ONLY_LAYER = Layer()


class Mixer(nnx.Module, abc.ABC):
  """Map x `[B L D]` to y `[B L D]`, causally: `Mixer(cfg, width, rngs=rngs)`.

  A decoding state is a pytree with everything a mixer stores of earlier tokens; the entry "S" is
  what the paper counts as recurrent state. For packed sequences the given state belongs to the
  first segment and the returned one to the last.
  """

  Config: ClassVar[type[MixerConfig]]
  # Formulas in the notation of the paper's table of linear transformers.
  recurrence: ClassVar[str]
  readout: ClassVar[str]
  # Operator in deltanet_jax.ops, its algorithm for full sequences, and its accelerator kernels.
  operator: ClassVar[str]
  efficient_form: ClassVar[str]
  kernels: ClassVar[str] = "plain XLA"
  # What decoding stores: a "state" of constant size, a "cache" of keys and values, or the "history"
  # of inputs.
  decode: ClassVar[str] = "state"
  # Entries of the state that `mix` accepts as `LayerState` (updated in place) and returns as such.
  in_place: ClassVar[tuple[str, ...]] = ()
  # Whether initial weights depend on the layer; the constructor then takes `layer: Layer`.
  by_layer: ClassVar[bool] = False
  # Whether `mix` takes `lower_bound` [D] of its decay, which the model learns for all layers.
  bounded: ClassVar[bool] = False

  @abc.abstractmethod
  def init_state(self, batch: int, max_length: int, dtype) -> Any:
    """Return the state before the first token, for `batch` sequences of up to `max_length` tokens.

    Only caches and histories depend on `max_length`.
    """

  @abc.abstractmethod
  def mix(self, x, segment_ids, state) -> tuple[Array, Any]:
    """Return (y, new state); with `state=None` start from zero and return None as the state."""

  @abc.abstractmethod
  def flops(self, length: int) -> float:
    """Forward FLOPs per token, without those of the weight matmuls."""

  @abc.abstractmethod
  def recurrent_state(self) -> int | None:
    """Size of "S" for one sequence; None if the state grows with the sequence length."""

  def __call__(
    self, x: Float[Array, "B L D"], segment_ids: Int[Array, "B L"] | None = None
  ) -> Float[Array, "B L D"]:
    return self.mix(x, segment_ids, None)[0]

  def step(self, x_t: Float[Array, "B D"], state: Any) -> tuple[Float[Array, "B D"], Any]:
    """Decode one token."""
    y, state = self.mix(x_t[:, None], None, state)
    return y[:, 0], state


def check_conv(conv: int):
  """Raise ValueError for an invalid kernel width of a short convolution."""
  check(
    conv == 0 or conv > 1,
    f"conv is {conv!r}, expected a kernel width above 1, or 0 for no convolution.",
  )


def check_implementation(implementation: str | None):
  """Raise ValueError for an unknown implementation of the delta rule."""
  DELTA_RULE.check_name(implementation)


def count_heads(width: int, **size: int) -> int:
  """Number of heads that fill the width, given the head size by its field name."""
  ((name, value),) = size.items()
  check(width % value == 0, f"{name} is {value}, expected a divisor of the width {width}.")
  return width // value
