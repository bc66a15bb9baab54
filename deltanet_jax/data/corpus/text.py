"""Documents of text files, JSON and JSON lines, plain or compressed, and of Parquet and Arrow."""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import importlib.util
import json
import lzma
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from deltanet_jax.data.corpus import arrow

TEXTS = (".txt", ".md", "")  # one document each; without a suffix if it is text
KINDS = (*TEXTS, ".json", ".jsonl", *arrow.SUFFIXES)
PACKINGS = (".gz", ".xz", ".zst")
_BLOCK = 1 << 20  # bytes read at a time

# A file, a folder or a glob pattern, or several of them.
Paths = str | pathlib.Path | Sequence[str | pathlib.Path]


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


def find_sources(path: Paths) -> tuple[list[Source], list[str]]:
  """The input files that are read, sorted by name, and the names of files that are skipped.

  Args:
    path: a file, a folder (searched recursively), a glob pattern, a dataset folder of Hugging Face
      `datasets`, or several of these. Hidden files and folders are skipped.
  """
  if isinstance(path, str | pathlib.Path):
    return _find(pathlib.Path(path)) if not _is_pattern(path) else find_sources(_matches(path))
  sources, skipped = [], []
  for one in path:
    own, left = find_sources(one)
    if _is_pattern(one):
      sources += own
    else:
      # Names of several inputs may coincide: the path as given tells them apart.
      above = pathlib.Path(one).parent if pathlib.Path(one).is_file() else pathlib.Path(one)
      sources += [dataclasses.replace(x, name=(above / x.name).as_posix()) for x in own]
    skipped += left
  unique = {source.path.resolve(): source for source in sources}  # a file given twice is read once
  return sorted(unique.values(), key=lambda s: s.name), sorted(skipped)


def _is_pattern(path: str | pathlib.Path) -> bool:
  return glob.has_magic(str(path)) and not pathlib.Path(path).exists()


def _matches(pattern: str | pathlib.Path) -> list[pathlib.Path]:
  found = [pathlib.Path(name) for name in sorted(glob.glob(str(pattern), recursive=True))]
  if not found:
    raise FileNotFoundError(f"{pattern} matches no file.")
  return found


def _find(path: pathlib.Path) -> tuple[list[Source], list[str]]:
  if not path.exists():
    raise FileNotFoundError(f"{path} does not exist; give a text file, JSON lines or a folder.")
  for file in path.rglob("dataset_dict.json"):
    arrow.dataset_files(file.parent)  # raises if there are several splits
  files = arrow.dataset_files(path)
  if files is None:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
  sources, skipped = [], []
  for file in files:
    relative = file.relative_to(path) if file != path else pathlib.Path(file.name)
    packing = file.suffix if file.suffix in PACKINGS else ""
    kind = pathlib.Path(file.name.removesuffix(packing)).suffix
    hidden = file != path and any(part.startswith(".") for part in relative.parts)
    unread = kind not in KINDS or (packing and kind in arrow.SUFFIXES) or arrow.is_metadata(file)
    if hidden or unread or (kind == "" and not _is_text(file, packing)):
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
      elif source.kind in arrow.SUFFIXES:
        for i, (read, text) in enumerate(arrow.texts(source.path, text_field)):
          place = f", row {i + 1}"
          yield text
          progress(int(read * source.size) - seen)
          seen = int(read * source.size)
      else:
        for here, entry in _entries(blocks, source.kind):
          place = here
          yield _text_of(entry, text_field)
          if (read := raw.tell()) != seen:
            progress(read - seen)
            seen = read
    except (ImportError, arrow.ColumnError):
      raise
    except Exception as e:
      # Broken files show themselves in many ways, each library with exceptions of its own.
      raise ValueError(
        f"{source.path}{place}: {e}; mend the file or take it out of the input."
      ) from e
    progress(source.size - seen)
