"""Documents of text files, JSON and JSON lines, plain or compressed."""

import codecs
import contextlib
import dataclasses
import gzip
import importlib.util
import json
import lzma
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

TEXTS = (".txt", ".md", "")  # one document each; without a suffix if it is text
KINDS = (*TEXTS, ".json", ".jsonl")
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


def find_sources(path: str | pathlib.Path) -> tuple[list[Source], list[str]]:
  """The file, or all files below the folder that are read, sorted by name; and names of the others.

  Hidden files and folders are left out.
  """
  path = pathlib.Path(path)
  if not path.exists():
    raise FileNotFoundError(f"{path} does not exist; give a text file, JSON lines or a folder.")
  files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
  sources, skipped = [], []
  for file in files:
    relative = file.relative_to(path) if file != path else pathlib.Path(file.name)
    packing = file.suffix if file.suffix in PACKINGS else ""
    kind = pathlib.Path(file.name.removesuffix(packing)).suffix
    hidden = file != path and any(part.startswith(".") for part in relative.parts)
    if hidden or kind not in KINDS or (kind == "" and not _is_text(file, packing)):
      skipped.append(relative.as_posix())
    else:
      sources.append(Source(relative.as_posix(), file, kind, packing, file.stat().st_size))
  if not sources:
    kinds = ", ".join(kind for kind in KINDS if kind)
    raise ValueError(
      f"{path} holds no text that is read: {kinds} or no suffix, also with {', '.join(PACKINGS)}."
    )
  return sorted(sources, key=lambda s: s.name), sorted(skipped)


def _is_text(file: pathlib.Path, packing: str) -> bool:
  """Whether a file without a suffix begins like text: UTF-8 without zeros."""
  with open(file, "rb") as raw:
    try:
      begin = next(_blocks(raw, packing), b"")
      codecs.getincrementaldecoder("utf-8")().decode(begin)  # a character may be cut at the end
    except ImportError:
      raise
    except Exception:  # each packing has exceptions of its own for what it is not
      return False
  return b"\0" not in begin


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


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
  rest = b""
  for block in blocks:
    *lines, rest = (rest + block).split(b"\n")
    yield from lines
  yield rest


def _json_rows(content: bytes) -> list | None:
  """The objects of an array, or the only one; None for JSON lines, which .json may be as well."""
  try:
    values = json.loads(content)
  except json.JSONDecodeError as e:
    if e.msg == "Extra data":
      return None
    raise
  return values if isinstance(values, list) else [values]


def _entries(blocks: Iterable[bytes], kind: str) -> Iterator[tuple[str, Any]]:
  """A place in the file and what is there, an object or a line of JSON."""
  if kind == ".json":
    content = b"".join(blocks)
    rows = _json_rows(content)
    if rows is not None:
      yield from ((f", object {i + 1}", row) for i, row in enumerate(rows))
      return
    blocks = [content]
  yield from ((f", line {i + 1}", line) for i, line in enumerate(_lines(blocks)) if line.strip())


def _text_of(entry, field: str) -> bytes:
  row = json.loads(entry) if isinstance(entry, bytes) else entry
  if not isinstance(row, dict) or not isinstance(row.get(field), str):
    raise ValueError(f"no text in a field {field!r}")
  return row[field].encode()


def read_documents(
  source: Source, text_field: str, progress: Callable[[int], None]
) -> Iterator[bytes]:
  """UTF-8 of each document: a text file whole, or the field of each JSON object.

  Args:
    progress: is told the bytes of the file read since it was told last.
  """
  place, seen = "", 0
  with open(source.path, "rb") as raw:
    try:
      blocks = _blocks(raw, source.packing)
      if source.kind in TEXTS:
        text = b"".join(blocks)
        text.decode()  # raises where it is no UTF-8
        yield text
      else:
        for here, entry in _entries(blocks, source.kind):
          place = here
          yield _text_of(entry, text_field)
          if (read := raw.tell()) != seen:
            progress(read - seen)
            seen = read
    except ImportError:
      raise
    except Exception as e:
      # Broken files show themselves in many ways, each library with exceptions of its own.
      raise ValueError(
        f"{source.path}{place}: {e}; mend the file or take it out of the input."
      ) from e
    progress(source.size - seen)
