"""External shuffle of documents on disk, with one bucket in memory at a time.

A document is assigned to a bucket by the leading bits of a hash of (seed, document index), and each
bucket is sorted by that hash when it is read. The concatenation of sorted buckets is sorted, so the
order does not depend on the number of buckets.
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

_BUCKET = 1 << 26  # input bytes per bucket; compressed input expands 3-5x in memory
_MAX_BUCKETS = 512  # all bucket files are open at once
_HEADER = struct.Struct(">QQ")  # hash and size in bytes of a document


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketInfo:
  """Contents of a folder of buckets, as stored in `.partial/dealt.json`."""

  buckets: int
  documents: int
  dropped: int  # documents without text
  bytes: int  # UTF-8 text


def _file(folder: pathlib.Path, bucket: int) -> pathlib.Path:
  return folder / f"bucket-{bucket:03}"


def write_buckets(
  sources: list[Source], text_field: str, seed: int, folder: pathlib.Path
) -> BucketInfo:
  """Write the documents of all sources into buckets."""
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
  return BucketInfo(buckets=buckets, documents=number, dropped=dropped, bytes=text_bytes)


def is_complete(folder: pathlib.Path, info: BucketInfo) -> bool:
  """Whether the bucket files have their recorded total size."""
  paths = [_file(folder, i) for i in range(info.buckets)]
  size = sum(file.stat().st_size for file in paths if file.is_file())
  return size == info.bytes + info.documents * _HEADER.size


def read_shuffled(folder: pathlib.Path, buckets: int) -> Iterator[bytes]:
  """Yield the UTF-8 text of all documents in shuffled order."""
  for i in range(buckets):
    content = _file(folder, i).read_bytes()
    spans, offset = [], 0
    while offset < len(content):
      key, size = _HEADER.unpack_from(content, offset)
      offset += _HEADER.size
      spans.append((key, offset, offset + size))
      offset += size
    for _, start, stop in sorted(spans):
      yield content[start:stop]
