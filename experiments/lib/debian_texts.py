"""Public-domain prose from Debian packages: a Bible and commentaries (SWORD), novels (R data).

Downloads packages with `apt-get download` and unpacks them into a temporary folder; installs
nothing and needs no root.
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

# Package -> content; the copyright file of each says that its text is in the public domain.
PACKAGES = {
  "r-cran-janeaustenr": "the six novels of Jane Austen",
  "sword-text-web": "the World English Bible",
  "sword-comm-mhcc": "Matthew Henry's concise commentary on the Bible",
  "sword-comm-tdavid": "Spurgeon's Treasury of David, on the Psalms",
  "sword-comm-scofield": "Scofield's reference notes, 1917",
}
_DOCUMENT_BYTES = 16_000  # texts are split into documents of about this size, at line ends
# XML elements that are not running text, and elements that end a line.
_ASIDE = re.compile(r"<(note|title|rdg)\b[^>]*?(?<!/)>.*?</\1>", re.DOTALL)
_BREAK = re.compile(r"</?(lb|p|l|div|milestone|chapter|verse)\b[^>]*>")
_STRING, _STRINGS = 9, 16  # SEXP types of R: a string (CHARSXP), a vector of strings (STRSXP)


def fetch() -> Iterator[tuple[str, str]]:
  """Yield (package, text) of every document, in a deterministic order."""
  for program in ("apt-get", "dpkg-deb"):
    if shutil.which(program) is None:
      raise ValueError(
        f"{program} is not installed, so Debian packages cannot be downloaded: use the bundled"
        " novels with --shipped, or your own text with experiments.prepare_data."
      )
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      ["apt-get", "download", "-q", *PACKAGES], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
      output = done.stderr.strip().splitlines()
      raise ValueError(
        f"apt-get could not download {', '.join(PACKAGES)}"
        f" ({output[-1] if output else 'no message'}): run `apt-get update`, or use the bundled"
        " novels with --shipped."
      )
    for package in PACKAGES:
      (archive,) = pathlib.Path(folder).glob(f"{package}_*.deb")
      unpacked = pathlib.Path(folder) / package
      subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
      texts = [x for path in sorted(unpacked.rglob("*.[bc]zs")) for x in sword_texts(path)]
      texts += [x for path in sorted(unpacked.rglob("data/*.rdb")) for x in r_texts(path)]
      if not texts:
        raise ValueError(f"{archive.name} has no text in a known format.")
      for text in texts:
        for piece in pieces(text):
          yield package, piece


def sword_texts(index: pathlib.Path) -> Iterator[str]:
  """Books or chapters of a SWORD module; `index` has offsets and sizes of compressed blocks."""
  entries = struct.iter_unpack("<III", index.read_bytes())
  data = index.with_suffix(f"{index.suffix[:-1]}z").read_bytes()
  for start, size, _ in entries:
    if size and (text := plain(zlib.decompress(data[start : start + size]).decode())):
      yield text


def plain(markup: str) -> str:
  """The running text of OSIS XML, without notes and titles; one line per paragraph or verse."""
  text = _BREAK.sub("\n", _ASIDE.sub("", markup))
  text = html.unescape(re.sub(r"<[^>]+>", "", text)).replace("¶", "").replace("\xa0", " ")
  text = re.sub(r"[ \t]+", " ", text)
  return re.sub(r"\s*\n\s*", "\n", text).strip()


def r_texts(path: pathlib.Path) -> Iterator[str]:
  """Every vector of strings in an R lazy-load database, as lines of one text."""
  raw = path.read_bytes()
  at = 0
  while at < len(raw):
    # Each value: 4 bytes of length, then a zlib stream.
    stream = zlib.decompressobj()
    value = stream.decompress(raw[at + 4 :])
    at = len(raw) - len(stream.unused_data)
    # A header that ends with length and name of the encoding, then the value.
    (name,) = struct.unpack_from(">I", value, 14)
    kind, count = struct.unpack_from(">II", value, 18 + name)
    if kind & 0xFF == _STRINGS:
      yield _unwrapped(_strings(value, 26 + name, count))


def _strings(value: bytes, at: int, count: int) -> list[str]:
  lines = []
  for _ in range(count):
    kind, size = struct.unpack_from(">Ii", value, at)
    if kind & 0xFF != _STRING:
      raise ValueError("a vector of strings of R has an element of another type.")
    lines.append(value[at + 8 : at + 8 + max(size, 0)].decode())
    at += 8 + max(size, 0)
  return lines


def _unwrapped(lines: list[str]) -> str:
  """Join wrapped lines of 70 characters; empty lines separate paragraphs."""
  paragraphs = "\n".join(line.strip() for line in lines).split("\n\n")
  return "\n".join(" ".join(x.split("\n")).strip() for x in paragraphs if x.strip())


def pieces(text: str) -> Iterator[str]:
  """Split a text at line ends, so that the validation split samples many positions of it."""
  piece: list[str] = []
  size = 0
  for line in text.splitlines(keepends=True):
    piece.append(line)
    size += len(line.encode())
    if size >= _DOCUMENT_BYTES:
      yield "".join(piece)
      piece, size = [], 0
  if "".join(piece).strip():
    yield "".join(piece)
