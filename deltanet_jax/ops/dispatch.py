"""Choice of an operator's implementation: tables, platform defaults, validation and messages.

Each operator declares one `Operator` with a table: implementation name -> `Entry`. Adding a kernel
is adding one entry. `Operator.resolve` turns the user's `implementation=` into an entry.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax

from pallas_kernels.common.autodiff import reverse_only

PLATFORMS = ("cpu", "gpu", "tpu")
# Part of the key of jax's caches: a function traced for one platform is not reused for another.
_compiling_for = jax.make_user_context(None)


def compiling_for(platform: str) -> contextlib.AbstractContextManager:
  """Make operators traced inside this context choose the implementations of `platform`.

  For AOT compilation on a machine without the device:
  `with compiling_for("tpu"): jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))`.

  Args:
    platform: "cpu", "gpu" or "tpu".

  Raises:
    ValueError: for any other platform.
  """
  if platform not in PLATFORMS:
    raise ValueError(f"platform is {platform!r}, expected one of {list(PLATFORMS)}.")
  return _compiling_for(platform)


def target_platform() -> str:
  """Return the platform that is compiled for: that of `compiling_for`, else of this process."""
  return _compiling_for.value or jax.default_backend()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One implementation of an operator.

  Attributes:
    run: Computes the operator on a sequence. Its signature is the operator's own convention.
    step: Computes one decoding token; None for operators without a step function.
    default_on: Platforms on which `implementation=None` may choose this entry.
    default_if: `(*inputs) -> bool`, whether `implementation=None` may choose it. An entry that is
      requested by name runs regardless.
    unsupported_reason: `(*inputs) -> str | None`, why it cannot compute these inputs.
    interpretable: Whether it accepts `interpret=True` (Pallas kernels).
    forward_mode: Whether it supports forward-mode autodiff.
  """

  run: Callable
  step: Callable | None = None
  default_on: tuple[str, ...] = ()
  default_if: Callable[..., bool] = lambda *inputs: True
  unsupported_reason: Callable[..., str | None] = lambda *inputs: None
  interpretable: bool = False
  forward_mode: bool = True


@dataclasses.dataclass
class Operator:
  """An operator's name and its implementations, in order of preference.

  At least one entry must be a default on every platform and support all inputs.
  """

  name: str
  table: dict[str, Entry]

  def check_name(self, implementation: str | None):
    """Raise ValueError unless `implementation` is in the table or None."""
    if implementation is not None and implementation not in self.table:
      raise ValueError(
        f"implementation is {implementation!r}, expected one of {list(self.table)} for {self.name}."
      )

  def resolve(self, implementation: str | None, *inputs, interpret: bool = False) -> Entry:
    """Return the entry that computes these inputs.

    A name selects that entry or raises; it never falls back. None selects the first entry of the
    table that is a default on `target_platform()` and supports the inputs.

    Raises:
      ValueError: for an unknown name, for a named implementation that does not support the inputs,
        and for `interpret=True` without the name of an interpretable implementation.
    """
    self.check_name(implementation)
    if interpret and not (implementation and self.table[implementation].interpretable):
      kernels = [name for name, entry in self.table.items() if entry.interpretable]
      raise ValueError(
        f"interpret=True is for Pallas kernels, expected implementation to be one of {kernels} for"
        f" {self.name}, got {implementation!r}."
      )
    if implementation is None:
      return self.table[self._default(inputs)]
    entry = self.table[implementation]
    if reason := entry.unsupported_reason(*inputs):
      raise ValueError(
        f'{self.name} with implementation="{implementation}" does not support these inputs:'
        f' {reason}; use implementation="{self._default(inputs)}" or None.'
      )
    return entry

  def _default(self, inputs) -> str:
    platform = target_platform()
    for name, entry in self.table.items():
      if platform not in entry.default_on or not entry.default_if(*inputs):
        continue
      if not entry.unsupported_reason(*inputs):
        return name
    raise AssertionError(f"{self.name} has no default implementation on {platform}.")

  def guard_forward_mode(self, entry: Entry, args):
    """Return args; forward-mode autodiff through them raises if the entry does not support it."""
    if entry.forward_mode:
      return args
    supported = [name for name, entry in self.table.items() if entry.forward_mode]
    return reverse_only(args, forward_mode_unsupported(self.name, supported))


def forward_mode_unsupported(operator: str, supported: Sequence[str]) -> str:
  """The error message for forward-mode autodiff of an implementation with a custom VJP only.

  Args:
    operator: name of the operator.
    supported: names of its implementations that support forward mode.
  """
  names = " or ".join(f'"{name}"' for name in supported)
  return (
    f"{operator} supports forward-mode autodiff (jax.jvp, jax.linearize, jax.hessian) only with"
    f" implementation={names}, in a model the mixer's `implementation` setting: the others define a"
    " custom VJP, which is reverse mode only."
  )
