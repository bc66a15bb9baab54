"""Read documents from text, JSON and JSON lines files, plain or compressed, Parquet and Arrow."""

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
from deltanet_jax.files import as_local_path

TEXTS = (".txt", ".md", "")  # one document per file; files without suffix only if they are text
KINDS = (*TEXTS, ".json", ".jsonl", *arrow.SUFFIXES)
PACKINGS = (".gz", ".xz", ".zst")
_BLOCK = 1 << 20  # bytes read at a time

# A file, a folder or a glob pattern, or several of them.
Paths = str | pathlib.Path | Sequence[str | pathlib.Path]


@dataclasses.dataclass(frozen=True)
class Source:
  """One input file; `name` is its path relative to the input folder."""

  name: str
  path: pathlib.Path
  kind: str
  packing: str
  size: int


def shipped_corpus() -> pathlib.Path:
  """Return the path of two novels by Jane Austen, a chapter per JSON line (shipped/README.md)."""
  return pathlib.Path(__file__).parent / "shipped" / "austen.jsonl.xz"


def find_sources(path: Paths) -> tuple[list[Source], list[str]]:
  """Return the supported input files, sorted by name, and the names of skipped files.

  Args:
    path: A file, a folder (searched recursively), a glob pattern, a folder written by
      `save_to_disk` of Hugging Face `datasets`, or several. Hidden files and folders are skipped.
  """
  if isinstance(path, str | pathlib.Path):
    path = as_local_path(path, "text input")
    return find_sources(_matches(path)) if _is_pattern(path) else _find(path)
  sources, skipped = [], []
  for one in path:
    one = as_local_path(one, "text input")
    found, others = find_sources(one)
    if not _is_pattern(one):
      # Files of several inputs may have the same name: the path as given distinguishes them.
      folder = one.parent if one.is_file() else one
      found = [dataclasses.replace(x, name=(folder / x.name).as_posix()) for x in found]
    sources += found
    skipped += others
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
    raise FileNotFoundError(
      f"{path} does not exist, expected a text, JSON, JSON lines or Parquet file, or a folder."
    )
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
    other = kind not in KINDS or (packing and kind in arrow.SUFFIXES) or arrow.is_metadata(file)
    if hidden or other or (kind == "" and not _is_text(file, packing)):
      skipped.append(relative.as_posix())
    else:
      sources.append(Source(relative.as_posix(), file, kind, packing, file.stat().st_size))
  if not sources:
    kinds = ", ".join(kind for kind in KINDS if kind)
    raise ValueError(
      f"{path} has no supported text file: {kinds} or no suffix, also with {', '.join(PACKINGS)}."
    )
  return sorted(sources, key=lambda s: s.name), sorted(skipped)


def _is_text(file: pathlib.Path, packing: str) -> bool:
  """Whether the start of a file is text: UTF-8 without null bytes."""
  with open(file, "rb") as raw:
    try:
      start = next(_blocks(raw, packing), b"")
      codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be cut
    except ImportError:
      raise
    except Exception:  # each decompressor has its own exceptions
      return False
  return b"\0" not in start


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
  if importlib.util.find_spec("zstandard") is None:
    raise ImportError(
      "Files that end in .zst need the package zstandard: "
      'install it with `pip install "deltanet-jax[data]"`.'
    )
  import zstandard

  # The package's own reader accepts a truncated file, one that ends inside a frame.
  frame = zstandard.ZstdDecompressor().decompressobj()
  while packed := raw.read(_BLOCK):
    while packed:
      if frame.eof:
        frame = zstandard.ZstdDecompressor().decompressobj()
      yield frame.decompress(packed)
      packed = frame.unused_data
  if not frame.eof:
    raise EOFError("the compressed data are truncated")


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


def _json_objects(content: bytes) -> list | None:
  """Return the objects of an array, or the single object; None if a .json file has JSON lines."""
  try:
    values = json.loads(content)
  except json.JSONDecodeError as e:
    if e.msg == "Extra data":
      return None
    raise
  return values if isinstance(values, list) else [values]


def _entries(blocks: Iterable[bytes], kind: str) -> Iterator[tuple[str, Any]]:
  """Yield a location for messages and an object or a line of JSON."""
  if kind == ".json":
    content = b"".join(blocks)
    objects = _json_objects(content)
    if objects is not None:
      yield from ((f", object {i + 1}", x) for i, x in enumerate(objects))
      return
    blocks = [content]
  yield from ((f", line {i + 1}", line) for i, line in enumerate(_lines(blocks)) if line.strip())


def _text_of(entry, field: str) -> bytes:
  value = json.loads(entry) if isinstance(entry, bytes) else entry
  if not isinstance(value, dict) or not isinstance(value.get(field), str):
    raise ValueError(f"no text in a field {field!r}")
  return value[field].encode()


def read_documents(
  source: Source, text_field: str, progress: Callable[[int], None]
) -> Iterator[bytes]:
  """Yield the UTF-8 text of each document: a text file, or a field of each JSON object or row.

  Args:
    source: Input file.
    text_field: Field of the JSON objects, or column of Parquet and Arrow files, with the text.
    progress: Called with the number of bytes of the file read since the last call.
  """
  location, reported = "", 0
  with open(source.path, "rb") as raw:
    try:
      blocks = _blocks(raw, source.packing)
      if source.kind in TEXTS:
        text = b"".join(blocks)
        text.decode()  # raises if it is not UTF-8
        yield text
      elif source.kind in arrow.SUFFIXES:
        for i, (fraction, text) in enumerate(arrow.texts(source.path, text_field)):
          location = f", row {i + 1}"
          yield text
          if (read := int(fraction * source.size)) != reported:
            progress(read - reported)
            reported = read
      else:
        for here, entry in _entries(blocks, source.kind):
          location = here
          yield _text_of(entry, text_field)
          if (read := raw.tell()) != reported:
            progress(read - reported)
            reported = read
    except (ImportError, arrow.ColumnError):
      raise
    except Exception as e:
      # Each library has its own exceptions for damaged files.
      raise ValueError(
        f"{source.path}{location}: {e}; fix the file or remove it from the input."
      ) from e
    progress(source.size - reported)
