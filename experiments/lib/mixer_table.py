"""The paper's overview of linear recurrent models, with operators and kernels of each mixer."""

import jax
import jax.numpy as jnp
from flax import nnx

from deltanet_jax.mixers import Mixer, build_mixer, mixer_class
from deltanet_jax.models import PRESETS, preset
from experiments.lib.tables import table

SIZE = "1.3b"
HEADER = [
  "mixer",
  "recurrence",
  "read-out",
  "operator",
  f"state, {SIZE.upper()}",
  "decode",
  "kernels",
  "efficient form",
]
_FORMULAS = (1, 2)


def text(names: list[str]) -> str:
  """A table for the terminal."""
  rows = [HEADER, *map(_row, names)]
  widths = [max(map(len, column)) for column in zip(*rows)]
  return "".join(
    "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() + "\n" for row in rows
  )


def markdown(names: list[str]) -> str:
  """The table in Markdown, with formulas as code."""
  lines = [_row(name) for name in names]
  for line in lines:
    for i in _FORMULAS:
      line[i] = "`" + line[i].replace("|", "\\|") + "`"
  return table(HEADER, lines)


def _row(kind):
  mixer = mixer_class(kind)
  return [
    kind,
    mixer.recurrence,
    mixer.readout,
    mixer.operator,
    _state(kind),
    mixer.decode,
    mixer.kernels,
    mixer.efficient_form,
  ]


def _state(kind):
  """State size of one layer, in elements, in the first preset with only this mixer."""
  presets = (preset(name) for name in PRESETS if name.endswith(f"-{SIZE}"))
  pure = (cfg for cfg in presets if [mixer.kind for mixer in cfg.mixers.values()] == [kind])
  cfg = next(pure, None)
  if cfg is None:
    return "–"
  (settings,) = cfg.mixers.values()
  mixer = jax.eval_shape(lambda: build_mixer(settings, cfg.width, rngs=nnx.Rngs(params=0)))
  recurrent = mixer.recurrent_state()
  if recurrent is not None:
    return f"{recurrent:,}"
  return f"{_per_sequence(mixer, 2) - _per_sequence(mixer, 1):,} per token"


def _per_sequence(mixer: Mixer, length):
  """Elements of the state per sequence of this length."""
  make = lambda batch: lambda mixer: mixer.init_state(batch, length, jnp.bfloat16)
  one, two = (_elements(jax.eval_shape(make(batch), mixer)) for batch in (1, 2))
  return two - one


def _elements(state):
  floats = (x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating))
  return sum(x.size for x in floats)
