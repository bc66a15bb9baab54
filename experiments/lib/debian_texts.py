"""Public-domain prose out of Debian's packages: commentaries and a Bible of SWORD, novels of R.

Packages are downloaded by name with the system's own `apt-get` and unpacked into a folder; nothing
is installed, and root is not needed.
"""

import html
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator

# Package -> what it holds; each says that its text is in the public domain.
PACKAGES = {
  "r-cran-janeaustenr": "the six novels of Jane Austen",
  "sword-text-web": "the World English Bible",
  "sword-comm-mhcc": "Matthew Henry's concise commentary on the Bible",
  "sword-comm-tdavid": "Spurgeon's Treasury of David, on the Psalms",
  "sword-comm-scofield": "Scofield's reference notes, 1917",
}
_PIECE = 16_000  # bytes; a document is cut into pieces of about this size where a line ends
# Elements that are no part of the running text, and those that end a line.
_ASIDE = re.compile(r"<(note|title|rdg)\b[^>]*?(?<!/)>.*?</\1>", re.DOTALL)
_BREAK = re.compile(r"</?(lb|p|l|div|milestone|chapter|verse)\b[^>]*>")
_STRING, _STRINGS = 9, 16  # types of R's values: one text, and a list of them


def fetch() -> Iterator[tuple[str, str]]:
  """(package, text) of every piece, in one order."""
  for program in ("apt-get", "dpkg-deb"):
    if shutil.which(program) is None:
      raise ValueError(
        f"there is no {program} here, so Debian's packages cannot be had: take the novels of this"
        " package by --shipped, or your own text by experiments.prepare_data."
      )
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      ["apt-get", "download", "-q", *PACKAGES], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
      said = done.stderr.strip().splitlines()
      raise ValueError(
        f"apt-get could not download {', '.join(PACKAGES)} ({said[-1] if said else 'no reason'}):"
        " run `apt-get update`, or take the shipped novels by --shipped."
      )
    for package in PACKAGES:
      (archive,) = pathlib.Path(folder).glob(f"{package}_*.deb")
      unpacked = pathlib.Path(folder) / package
      subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
      texts = [x for path in sorted(unpacked.rglob("*.[bc]zs")) for x in sword_texts(path)]
      texts += [x for path in sorted(unpacked.rglob("data/*.rdb")) for x in r_texts(path)]
      if not texts:
        raise ValueError(f"{archive.name} holds no text in a form that is known here.")
      for text in texts:
        for piece in pieces(text):
          yield package, piece


def sword_texts(index: pathlib.Path) -> Iterator[str]:
  """Books or chapters of a SWORD module: `index` has where compressed blocks begin and end."""
  entries = struct.iter_unpack("<III", index.read_bytes())
  data = index.with_suffix(f"{index.suffix[:-1]}z").read_bytes()
  for start, size, _ in entries:
    if size and (text := plain(zlib.decompress(data[start : start + size]).decode())):
      yield text


def plain(markup: str) -> str:
  """The running text of OSIS, without notes and titles; a line is a paragraph or one of verse."""
  text = _BREAK.sub("\n", _ASIDE.sub("", markup))
  text = html.unescape(re.sub(r"<[^>]+>", "", text)).replace("¶", "").replace("\xa0", " ")
  text = re.sub(r"[ \t]+", " ", text)
  return re.sub(r"\s*\n\s*", "\n", text).strip()


def r_texts(path: pathlib.Path) -> Iterator[str]:
  """Every list of texts in a data base of R, as lines of one text."""
  raw = path.read_bytes()
  at = 0
  while at < len(raw):
    # Each value has its length, and is compressed.
    stream = zlib.decompressobj()
    value = stream.decompress(raw[at + 4 :])
    at = len(raw) - len(stream.unused_data)
    # A header that ends with the length and the name of the encoding, then the value.
    (name,) = struct.unpack_from(">I", value, 14)
    kind, count = struct.unpack_from(">II", value, 18 + name)
    if kind & 0xFF == _STRINGS:
      yield _unwrapped(_strings(value, 26 + name, count))


def _strings(value: bytes, at: int, count: int) -> list[str]:
  lines = []
  for _ in range(count):
    kind, size = struct.unpack_from(">Ii", value, at)
    if kind & 0xFF != _STRING:
      raise ValueError("a list of texts of R holds something else.")
    lines.append(value[at + 8 : at + 8 + max(size, 0)].decode())
    at += 8 + max(size, 0)
  return lines


def _unwrapped(lines: list[str]) -> str:
  """Paragraphs as lines: books are printed in lines of 70 letters, with an empty one between."""
  paragraphs = "\n".join(line.strip() for line in lines).split("\n\n")
  return "\n".join(" ".join(x.split("\n")).strip() for x in paragraphs if x.strip())


def pieces(text: str) -> Iterator[str]:
  """A text cut where lines end, so that what is held out comes from many places."""
  piece: list[str] = []
  size = 0
  for line in text.splitlines(keepends=True):
    piece.append(line)
    size += len(line.encode())
    if size >= _PIECE:
      yield "".join(piece)
      piece, size = [], 0
  if "".join(piece).strip():
    yield "".join(piece)
