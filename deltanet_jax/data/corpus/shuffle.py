"""Shuffles documents on disk: any number of them, with one bucket in memory at a time.

Documents are dealt into buckets by the leading bits of a hash of (seed, number), and each bucket is
sorted by that hash when it is read. Sorted buckets one after the other are one sorted corpus, so
the order does not depend on how many there are.
"""

import contextlib
import dataclasses
import hashlib
import math
import pathlib
import struct
from collections.abc import Iterator

from tqdm import tqdm

from deltanet_jax import files
from deltanet_jax.data.corpus.text import Source, read_documents

_BUCKET = 1 << 26  # bytes of input per bucket; compressed text takes three to five times as many
_MAX_BUCKETS = 512  # all are open at once
_HEADER = struct.Struct(">QQ")  # hash and bytes of a document


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dealt:
  """What lies in the buckets of a folder."""

  buckets: int
  documents: int
  dropped: int  # documents without text
  bytes: int


def _file(folder: pathlib.Path, bucket: int) -> pathlib.Path:
  return folder / f"bucket-{bucket:03}"


def deal(sources: list[Source], text_field: str, seed: int, folder: pathlib.Path) -> Dealt:
  """Writes the documents of all sources into buckets."""
  size = sum(source.size for source in sources)
  buckets = min(max(math.ceil(size / _BUCKET), 1), _MAX_BUCKETS)
  number = dropped = text_bytes = 0
  with contextlib.ExitStack() as stack:
    opened = [stack.enter_context(open(_file(folder, i), "wb")) for i in range(buckets)]
    bar = tqdm(total=size, desc="reading", unit="B", unit_scale=True, unit_divisor=1024)
    stack.enter_context(bar)
    for source in sources:
      for text in read_documents(source, text_field, bar.update):
        if not text.strip():
          dropped += 1
          continue
        digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest)
        file = opened[key * buckets >> 64]
        file.write(_HEADER.pack(key, len(text)))
        file.write(text)
        number += 1
        text_bytes += len(text)
  for i in range(buckets):
    files.sync(_file(folder, i))
  return Dealt(buckets=buckets, documents=number, dropped=dropped, bytes=text_bytes)


def is_whole(folder: pathlib.Path, dealt: Dealt) -> bool:
  """Whether the buckets have the bytes that were dealt."""
  paths = [_file(folder, i) for i in range(dealt.buckets)]
  size = sum(file.stat().st_size for file in paths if file.is_file())
  return size == dealt.bytes + dealt.documents * _HEADER.size


def shuffled(folder: pathlib.Path, buckets: int) -> Iterator[bytes]:
  """UTF-8 of all documents in the shuffled order."""
  for i in range(buckets):
    content = _file(folder, i).read_bytes()
    places, at = [], 0
    while at < len(content):
      key, size = _HEADER.unpack_from(content, at)
      at += _HEADER.size
      places.append((key, at, at + size))
      at += size
    for _, start, stop in sorted(places):
      yield content[start:stop]
