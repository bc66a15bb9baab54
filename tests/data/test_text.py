"""Documents come out of every kind of file, and broken files are named."""

import gzip
import importlib.util
import json
import lzma

import pytest

from deltanet_jax.data.corpus.text import find_sources, read_documents, shipped_corpus

TEXTS = ["first é\n", "", "third, " * 300_000]
JSONL = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS).encode()


def zst(content):
  zstandard = pytest.importorskip("zstandard", reason="needs the package zstandard")
  # Two frames, as appending to a file makes them.
  half = len(content) // 2
  packer = zstandard.ZstdCompressor()
  return packer.compress(content[:half]) + packer.compress(content[half:])


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}


def read(path, field="text"):
  told = []
  (source,) = find_sources(path)
  found = [text.decode() for text in read_documents(source, field, told.append)]
  assert sum(told) == path.stat().st_size
  return found


@pytest.mark.parametrize("packing", PACK)
def test_every_packing(packing, tmp_path):
  lines = tmp_path / f"a.jsonl{packing}"
  lines.write_bytes(PACK[packing](JSONL))
  assert read(lines) == TEXTS
  text = tmp_path / f"a.txt{packing}"
  text.write_bytes(PACK[packing](TEXTS[0].encode()))
  assert read(text) == [TEXTS[0]]


@pytest.mark.parametrize("packing", [p for p in PACK if p])
def test_cut_files_are_named(packing, tmp_path):
  path = tmp_path / f"a.txt{packing}"
  path.write_bytes(PACK[packing](JSONL)[:-30])
  with pytest.raises(ValueError, match=f"a.txt{packing}: .*mend the file"):
    read(path)


@pytest.mark.parametrize(
  "line,message",
  [
    (b'{"text": "x', r"a\.jsonl, line 3"),
    (b'{"body": "x"}', "line 3: no text in a field 'text'"),
    (b'{"text": null}', "line 3: no text in a field 'text'"),
    (b'"text"', "line 3: no text"),
    (b'{"text": "\xff"}', "line 3: 'utf-8' codec"),
    (b'{"text": "\\ud800"}', "line 3: 'utf-8' codec"),
  ],
)
def test_broken_lines_are_named(line, message, tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
  with pytest.raises(ValueError, match=message):
    read(path)


def test_other_fields_and_wrong_encodings(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"body": "x"}')
  assert read(path, "body") == ["x"]
  (tmp_path / "b.txt").write_bytes("é".encode("latin-1"))
  with pytest.raises(ValueError, match=r"b\.txt: 'utf-8' codec"):
    read(tmp_path / "b.txt")


def test_folders_are_searched_in_order(tmp_path):
  for name in ("b.txt", "a/z.jsonl.gz", "a/c.txt", "README.md", "x.gz"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
  assert [source.name for source in find_sources(tmp_path)] == ["a/c.txt", "a/z.jsonl.gz", "b.txt"]
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match=r"holds no \.txt or \.jsonl"):
    find_sources(tmp_path / "empty")
  with pytest.raises(FileNotFoundError, match="does not exist"):
    find_sources(tmp_path / "nothing")


def test_zst_without_its_package(tmp_path, monkeypatch):
  path = tmp_path / "a.txt.zst"
  path.write_bytes(b"x")
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"deltanet-jax\[data\]"):
    read(path)


def test_shipped_corpus():
  chapters = read(shipped_corpus())
  assert len(chapters) == 85
  assert sum(map(len, chapters)) == 1_150_197
  assert chapters[0].startswith("It is a truth universally acknowledged")
  assert chapters[61].startswith("Sir Walter Elliot, of Kellynch Hall")
