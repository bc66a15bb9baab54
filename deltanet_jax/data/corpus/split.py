"""Split of shuffled documents into training and validation; at most one document is cut in two.

The validation split is a fraction of the text's bytes, so it does not depend on the tokenizer:
models with different tokenizers are evaluated on the same text.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

from deltanet_jax.data.corpus.shuffle import BucketInfo, read_shuffled

_TOLERANCE = 0.1  # relative error of the validation fraction above which a document is cut
_BOUNDARIES = (b"\n\n", b"\n", b" ")  # where a document may be cut, in order of preference


@dataclasses.dataclass(frozen=True)
class Document:
  text: bytes
  ends: bool = True  # False for the first part of a document that was cut


@dataclasses.dataclass(frozen=True)
class SplitDocuments:
  """Documents of one split: a contiguous range of the shuffled documents in a folder of buckets.

  Attributes:
    first, stop: Range of document indices. A cut document counts as two, its second part first.
    cut: Index of the document that is cut, and the byte offset of the cut.
  """

  folder: pathlib.Path
  buckets: BucketInfo
  first: int
  stop: int
  cut: tuple[int, int] | None = None

  @property
  def count(self) -> int:
    return self.stop - self.first

  def documents(self, skip: int = 0) -> Iterator[Document]:
    """Yield all documents but the first `skip`."""
    return itertools.islice(self._all(), self.first + skip, self.stop)

  def _all(self) -> Iterator[Document]:
    for index, text in enumerate(read_shuffled(self.folder, self.buckets.buckets)):
      if self.cut and index == self.cut[0]:
        yield Document(text[self.cut[1] :])
        yield Document(text[: self.cut[1]], ends=False)
      else:
        yield Document(text)


def all_documents(folder: pathlib.Path, info: BucketInfo) -> SplitDocuments:
  """Return all documents as one split."""
  return SplitDocuments(folder, info, 0, info.documents)


def split_validation(
  folder: pathlib.Path, info: BucketInfo, fraction: float
) -> dict[str, SplitDocuments]:
  """Split off the first documents as validation until they have `fraction` of the bytes.

  The document at the boundary goes to the side that gives the smaller error of the fraction. If the
  error exceeds `_TOLERANCE`, or one side would be empty, that document is cut at the end of a
  paragraph (else a line, else a word), and its second part goes to validation.
  """
  wanted, size, count = fraction * info.bytes, 0, 0
  for text in read_shuffled(folder, info.buckets) if fraction else ():
    if size + len(text) < wanted:
      size, count = size + len(text), count + 1
      continue
    missing, excess = wanted - size, size + len(text) - wanted
    first, last = count == 0, count + 1 == info.documents
    include = excess < missing
    tolerance = _TOLERANCE * wanted
    if min(missing, excess) > tolerance or (last if include else first):
      if offset := _cut_offset(text, len(text) - missing, tolerance):
        return _splits(folder, info, count + 1, info.documents + 1, (count, offset))
      if first and last:
        raise ValueError(
          f"the only document has no line or word boundary to cut off a fraction of {fraction} for"
          " validation: add text, or set validation to 0."
        )
    count += first or (include and not last)
    break
  return _splits(folder, info, count, info.documents, None)


def _splits(folder, info, validation: int, documents: int, cut) -> dict[str, SplitDocuments]:
  return dict(
    validation=SplitDocuments(folder, info, 0, validation, cut),
    train=SplitDocuments(folder, info, validation, documents, cut),
  )


def _cut_offset(text: bytes, wanted: float, tolerance: float) -> int | None:
  """Return the offset of the best boundary near `wanted` with text on both sides, or None."""
  for boundary in _BOUNDARIES:
    before, after = text.rfind(boundary, 0, int(wanted)), text.find(boundary, int(wanted))
    offsets = [at + len(boundary) for at in (before, after) if at >= 0]
    offsets = [at for at in offsets if text[:at].strip() and text[at:].strip()]
    best = min(offsets, key=lambda at: abs(at - wanted), default=None)
    if best is not None and (abs(best - wanted) <= tolerance or boundary == _BOUNDARIES[-1]):
      return best
  return None
