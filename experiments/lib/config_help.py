"""The fields of a configuration as `--help` lists them, from the dataclasses and their comments."""

import dataclasses
import inspect
import re
from collections.abc import Iterator

from deltanet_jax.config import TrainConfig
from deltanet_jax.mixers import MIXERS, mixer_config

_FIELD = re.compile(r"  (\w+): [^#]*?(?:  # (.*))?")
_COLUMN = 44


def text() -> str:
  """Every field with its default and what it means."""
  lines = ["Fields of the configuration, with the defaults that a file may have changed:", ""]
  lines += _lines(TrainConfig, "--config.")
  for kind in MIXERS:
    lines += ["", f"of the mixer {kind}, in a model that calls it NAME (its kind, if pure):", ""]
    lines += _lines(mixer_config(kind), "--config.model.mixers.NAME.")
  return "\n".join(lines)


def _comments(cls: type) -> dict[str, str]:
  """What stands behind each field in the source, of the classes it inherits from too."""
  classes = filter(dataclasses.is_dataclass, reversed(cls.__mro__))
  lines = (line for one in classes for line in inspect.getsource(one).splitlines())
  found = (_FIELD.fullmatch(line) for line in lines)
  return {match[1]: match[2] or "" for match in found if match}


def _lines(cls: type, prefix: str) -> Iterator[str]:
  comments = _comments(cls)
  sections = []
  for field in dataclasses.fields(cls):
    if dataclasses.is_dataclass(field.type):
      sections.append(field)
      continue
    default = "" if field.default is dataclasses.MISSING else f"={field.default}"
    flag = f"{prefix}{field.name}{default}"
    yield f"  {flag:{_COLUMN}}  {comments[field.name]}".rstrip()
  for field in sections:
    yield from _lines(field.type, f"{prefix}{field.name}.")
