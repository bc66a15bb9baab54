"""Documents of text files and JSON lines, plain or compressed."""

import contextlib
import dataclasses
import gzip
import importlib.util
import json
import lzma
import pathlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

KINDS = (".txt", ".jsonl")
PACKINGS = (".gz", ".xz", ".zst")
_BLOCK = 1 << 20  # bytes read at a time


@dataclasses.dataclass(frozen=True)
class Source:
  """One input file; `name` is its path below the folder that was given."""

  name: str
  path: pathlib.Path
  kind: str
  packing: str
  size: int


def shipped_corpus() -> pathlib.Path:
  """Two novels by Jane Austen as JSON lines, a chapter each; see shipped/README.md."""
  return pathlib.Path(__file__).parent / "shipped" / "austen.jsonl.xz"


def find_sources(path: str | pathlib.Path) -> list[Source]:
  """The file, or all text files and JSON lines below the folder, sorted by name."""
  path = pathlib.Path(path)
  if not path.exists():
    raise FileNotFoundError(f"{path} does not exist; give a text file, JSON lines or a folder.")
  files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
  sources = []
  for file in files:
    packing = file.suffix if file.suffix in PACKINGS else ""
    kind = pathlib.Path(file.name.removesuffix(packing)).suffix
    if kind in KINDS:
      name = file.relative_to(path).as_posix() if file != path else file.name
      sources.append(Source(name, file, kind, packing, file.stat().st_size))
  if not sources:
    raise ValueError(f"{path} holds no {' or '.join(KINDS)} file (also {', '.join(PACKINGS)}).")
  return sorted(sources, key=lambda s: s.name)


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
  if importlib.util.find_spec("zstandard") is None:
    raise ImportError(
      "Files that end in .zst need the package zstandard: "
      'install it with `pip install "deltanet-jax[data]"`.'
    )
  import zstandard

  # The package's own reader takes a file that ends inside a frame for a whole one.
  frame = zstandard.ZstdDecompressor().decompressobj()
  while packed := raw.read(_BLOCK):
    while packed:
      if frame.eof:
        frame = zstandard.ZstdDecompressor().decompressobj()
      yield frame.decompress(packed)
      packed = frame.unused_data
  if not frame.eof:
    raise EOFError("the compressed data end too early")


def _blocks(raw: BinaryIO, packing: str) -> Iterator[bytes]:
  if packing == ".zst":
    yield from _zstd_blocks(raw)
    return
  unpack = {"": contextlib.nullcontext, ".gz": gzip.open, ".xz": lzma.open}[packing]
  with unpack(raw) as stream:
    while block := stream.read(_BLOCK):
      yield block


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
  rest = b""
  for block in blocks:
    *lines, rest = (rest + block).split(b"\n")
    yield from lines
  yield rest


def _json_text(line: bytes, field: str) -> bytes:
  row = json.loads(line)
  if not isinstance(row, dict) or not isinstance(row.get(field), str):
    raise ValueError(f"no text in a field {field!r}")
  return row[field].encode()


def read_documents(
  source: Source, text_field: str, progress: Callable[[int], None]
) -> Iterator[bytes]:
  """UTF-8 of each document: a text file whole, or the field of each JSON line.

  Args:
    progress: is told the bytes of the file read since it was told last.
  """
  number = seen = 0
  with open(source.path, "rb") as raw:
    try:
      blocks = _blocks(raw, source.packing)
      if source.kind == ".txt":
        text = b"".join(blocks)
        text.decode()  # raises where it is no UTF-8
        yield text
      else:
        for line in _lines(blocks):
          number += 1
          if line.strip():
            yield _json_text(line, text_field)
          if (place := raw.tell()) != seen:
            progress(place - seen)
            seen = place
    except ImportError:
      raise
    except Exception as e:
      # Broken files show themselves in many ways, each library with exceptions of its own.
      where = f"{source.path}, line {number}" if number else source.path
      raise ValueError(f"{where}: {e}; mend the file or take it out of the input.") from e
    progress(source.size - seen)
