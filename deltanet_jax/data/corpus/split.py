"""Which text is held out: whole documents, and at most one that is cut in two.

The share is of bytes of text, so it does not depend on the tokenizer: models of different ones are
compared on the same text.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

from deltanet_jax.data.corpus.shuffle import Dealt, shuffled

_TOLERANCE = 0.1  # by how much of itself the share may be missed before a document is cut
_BORDERS = (b"\n\n", b"\n", b" ")  # where one may be cut, the best first


@dataclasses.dataclass(frozen=True)
class Document:
  text: bytes
  ends: bool = True  # False for the first part of one that was cut


@dataclasses.dataclass(frozen=True)
class Part:
  """The documents of one split: some of those in the buckets of a folder, in their order.

  Attributes:
    first, stop: numbers of the documents; a cut one counts as two, its end before its beginning.
    cut: number of the document that is cut, and where.
  """

  folder: pathlib.Path
  dealt: Dealt
  first: int
  stop: int
  cut: tuple[int, int] | None = None

  @property
  def count(self) -> int:
    return self.stop - self.first

  def documents(self, skip: int = 0) -> Iterator[Document]:
    """All of them but the first `skip`."""
    return itertools.islice(self._all(), self.first + skip, self.stop)

  def _all(self) -> Iterator[Document]:
    for number, text in enumerate(shuffled(self.folder, self.dealt.buckets)):
      if self.cut and number == self.cut[0]:
        yield Document(text[self.cut[1] :])
        yield Document(text[: self.cut[1]], ends=False)
      else:
        yield Document(text)


def whole(folder: pathlib.Path, dealt: Dealt) -> Part:
  """All documents."""
  return Part(folder, dealt, 0, dealt.documents)


def hold_out(folder: pathlib.Path, dealt: Dealt, share: float) -> dict[str, Part]:
  """Validation and training: the first documents until the share is reached, and the others.

  The document at the border goes where the share is missed by less. Missed by more than a tenth of
  it, or with nothing on one side, that document is cut where a paragraph ends (else a line, a
  word), and its end is held out.
  """
  wanted, held, count = share * dealt.bytes, 0, 0
  for text in shuffled(folder, dealt.buckets) if share else ():
    if held + len(text) < wanted:
      held, count = held + len(text), count + 1
      continue
    without, with_it = wanted - held, held + len(text) - wanted
    first, last = count == 0, count + 1 == dealt.documents
    joins = with_it < without
    slack = _TOLERANCE * wanted
    if min(without, with_it) > slack or (last if joins else first):
      if at := _place(text, len(text) - without, slack):
        return _parts(folder, dealt, count + 1, dealt.documents + 1, (count, at))
      if first and last:
        raise ValueError(
          f"the only document has no line or word where a share of {share} could be cut off:"
          " give more text, or set validation to 0."
        )
    count += first or (joins and not last)
    break
  return _parts(folder, dealt, count, dealt.documents, None)


def _parts(folder, dealt, held_out: int, documents: int, cut) -> dict[str, Part]:
  return dict(
    validation=Part(folder, dealt, 0, held_out, cut),
    train=Part(folder, dealt, held_out, documents, cut),
  )


def _place(text: bytes, wanted: float, slack: float) -> int | None:
  """Where to cut so that both sides have text: at the best border near enough, or None."""
  for border in _BORDERS:
    before, after = text.rfind(border, 0, int(wanted)), text.find(border, int(wanted))
    places = [at + len(border) for at in (before, after) if at >= 0]
    places = [at for at in places if text[:at].strip() and text[at:].strip()]
    best = min(places, key=lambda at: abs(at - wanted), default=None)
    if best is not None and (abs(best - wanted) <= slack or border == _BORDERS[-1]):
      return best
  return None
