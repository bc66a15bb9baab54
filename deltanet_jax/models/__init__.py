"""Language models built from mixers: presets, construction and size summaries."""

from deltanet_jax.models.block import Block
from deltanet_jax.models.build import build, count_parameters, summarize
from deltanet_jax.models.lm import LM
from deltanet_jax.models.presets import PRESETS, preset

__all__ = [
  "LM",
  "PRESETS",
  "Block",
  "build",
  "count_parameters",
  "preset",
  "summarize",
]
