"""Reading documents from all supported file formats; errors name the damaged file."""

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
  # Two frames, as in a file that was appended to.
  half = len(content) // 2
  packer = zstandard.ZstdCompressor()
  return packer.compress(content[:half]) + packer.compress(content[half:])


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}


def read(path, field="text"):
  progress = []
  (source,), _ = find_sources(path)
  found = [text.decode() for text in read_documents(source, field, progress.append)]
  assert sum(progress) == path.stat().st_size
  return found


@pytest.mark.parametrize("packing", PACK)
def test_every_compression(packing, tmp_path):
  lines = tmp_path / f"a.jsonl{packing}"
  lines.write_bytes(PACK[packing](JSONL))
  assert read(lines) == TEXTS
  text = tmp_path / f"a.txt{packing}"
  text.write_bytes(PACK[packing](TEXTS[0].encode()))
  assert read(text) == [TEXTS[0]]


@pytest.mark.parametrize("packing", [p for p in PACK if p])
def test_errors_name_truncated_files(packing, tmp_path):
  path = tmp_path / f"a.txt{packing}"
  path.write_bytes(PACK[packing](JSONL)[:-30])
  with pytest.raises(ValueError, match=f"a.txt{packing}: .*fix the file"):
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
def test_errors_name_invalid_lines(line, message, tmp_path):
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


def test_folders_are_searched_in_order_and_skipped_files_are_returned(tmp_path):
  read = ("LICENSE", "README.md", "a/c.txt", "a/z.jsonl.gz", "b.txt", "d.json", "x.gz")
  others = (".git/config", ".hidden.txt", "a/figure.png", "binary", "half.xz")
  for name in (*read, *others):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\0" if name in ("binary", "half.xz") else b"")
  sources, skipped = find_sources(tmp_path)
  assert [source.name for source in sources] == sorted(read)
  assert skipped == sorted(others)
  (tmp_path / "empty").mkdir()
  with pytest.raises(
    ValueError, match=r"no supported text file: \.txt, .*\.jsonl, \.parquet, \.arrow or no"
  ):
    find_sources(tmp_path / "empty")
  with pytest.raises(FileNotFoundError, match="does not exist"):
    find_sources(tmp_path / "nothing")


def test_text_without_a_suffix_may_end_a_block_inside_a_character(tmp_path, monkeypatch):
  monkeypatch.setattr("deltanet_jax.data.corpus.text._BLOCK", 4)
  (tmp_path / "story").write_text("abcé" * 10)
  assert read(tmp_path / "story") == ["abcé" * 10]


@pytest.mark.parametrize(
  "content, texts",
  [
    ('[{"text": "a"}, {"text": "b", "id": 3}]', ["a", "b"]),
    ('{\n "text": "one"\n}\n', ["one"]),
    ('{"text": "a"}\n\n{"text": "b"}\n', ["a", "b"]),
    ("[]", []),
  ],
)
def test_json_is_an_array_an_object_or_lines(tmp_path, content, texts):
  (tmp_path / "a.json").write_text(content)
  assert read(tmp_path / "a.json") == texts


@pytest.mark.parametrize(
  "content, message",
  [
    ('[{"text": "a"}, {"body": "b"}]', r"a\.json, object 2: no text in a field 'text'"),
    ('{"text": "a"}\n{"text": 3}', r"a\.json, line 2: no text in a field 'text'"),
    ('[{"text": "a"', r"a\.json: Expecting"),
  ],
)
def test_errors_name_invalid_json(tmp_path, content, message):
  (tmp_path / "a.json").write_text(content)
  with pytest.raises(ValueError, match=message):
    read(tmp_path / "a.json")


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
