"""The configuration fields that `--help` lists: names, defaults and help texts."""

import dataclasses
from collections.abc import Iterator

from deltanet_jax.config import TrainConfig, help_of
from deltanet_jax.mixers import MIXERS, mixer_config

_COLUMN = 44


def text() -> str:
  """Every field with its default and its help text."""
  lines = ["Configuration fields and their defaults (a config file may set other values):", ""]
  lines += _lines(TrainConfig, "--config.")
  for kind in MIXERS:
    lines += ["", f"of the mixer {kind}, named NAME in the model (its kind if it is the only one):"]
    lines += ["", *_lines(mixer_config(kind), "--config.model.mixers.NAME.")]
  return "\n".join(lines)


def _lines(cls: type, prefix: str) -> Iterator[str]:
  sections = []
  for field in dataclasses.fields(cls):
    if dataclasses.is_dataclass(field.type):
      sections.append(field)
      continue
    default = "" if field.default is dataclasses.MISSING else f"={field.default}"
    flag = f"{prefix}{field.name}{default}"
    yield f"  {flag:{_COLUMN}}  {help_of(field)}".rstrip()
  for field in sections:
    yield from _lines(field.type, f"{prefix}{field.name}.")
