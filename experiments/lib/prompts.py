"""Prompts of `generate` from files and from standard input."""

import functools
import json
import sys

from absl import flags

from deltanet_jax.files import as_local_path

_TEXT_FILES = flags.DEFINE_multi_string(
  "text_file",
  [],
  "File with a prompt as text, without its last newline, or `-` for standard input; of a .jsonl"
  " file the field `text` of every line. Repeatable.",
)
_LINES = flags.DEFINE_bool("lines", False, "Every line of --text_file is a prompt, if not empty.")
_PROMPT_FILES = flags.DEFINE_multi_string(
  "prompt_file", [], "File, or `-`, with a prompt of comma-separated token ids per line; likewise."
)


@functools.cache
def texts() -> list[str]:
  """The prompts of --text_file."""
  if _LINES.value and not _TEXT_FILES.value:
    raise ValueError("--lines needs --text_file.")
  return [text for path in _unique("text_file", _TEXT_FILES.value) for text in _texts(path)]


@functools.cache
def token_ids() -> list[str]:
  """The lines of --prompt_file."""
  paths = _unique("prompt_file", _PROMPT_FILES.value)
  return [line.strip() for path in paths for line in _lines("prompt_file", path)]


def _unique(flag: str, paths: list[str]) -> list[str]:
  if paths.count("-") > 1:
    raise ValueError(f"--{flag}=- is given twice, but standard input can be read once.")
  return paths


def _texts(path: str) -> list[str]:
  if path.endswith(".jsonl"):
    return [_field(path, i + 1, line) for i, line in enumerate(_lines("text_file", path))]
  if _LINES.value:
    return _lines("text_file", path)
  return [_read("text_file", path).removesuffix("\n").removesuffix("\r")]


def _field(path: str, number: int, line: str) -> str:
  try:
    return json.loads(line)["text"]
  except (ValueError, KeyError, TypeError) as e:
    raise ValueError(f"{path}, prompt {number} is not an object with the field 'text'.") from e


def _lines(flag: str, path: str) -> list[str]:
  return [line for line in _read(flag, path).splitlines() if line.strip()]


def _read(flag: str, path: str) -> str:
  local = lambda: as_local_path(path, "a file of prompts")
  raw = sys.stdin.buffer.read() if path == "-" else local().read_bytes()
  name = "standard input" if path == "-" else path
  if not raw.strip():
    raise ValueError(f"--{flag}={path}: {name} is empty.")
  try:
    return raw.decode()
  except UnicodeDecodeError as e:
    raise ValueError(f"--{flag}={path}: {name} is not UTF-8 ({e}).") from e
