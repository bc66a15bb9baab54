"""Documents of Parquet files and of Hugging Face dataset folders."""

import json
import subprocess
import sys

import pytest

from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus import arrow
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.data.corpus.text import find_sources, read_documents

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = ["first é\n", "", "third " * 1000, *(f"document {i}" for i in range(600))]


def table(texts=TEXTS, kind=None, **columns):
  return pa.table({"id": list(range(len(texts))), "text": pa.array(texts, kind or pa.string())})


def read(path, column="text"):
  progress, found = [], []
  sources, _ = find_sources(path)
  for source in sources:
    found += [text.decode() for text in read_documents(source, column, progress.append)]
  assert sum(progress) == sum(source.size for source in sources)
  assert all(step >= 0 for step in progress)
  return found


def write_dataset(folder, shards):
  """The layout of `datasets.Dataset.save_to_disk`: Arrow streams listed in state.json."""
  folder.mkdir(parents=True)
  names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
  for name, texts in zip(names, shards):
    rows = table(texts)
    with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as out:
      out.write_table(rows, max_chunksize=100)
  state = {"_data_files": [{"filename": name} for name in names], "_split": None}
  (folder / "state.json").write_text(json.dumps(state))
  (folder / "dataset_info.json").write_text("{}")
  return folder


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
@pytest.mark.parametrize("rows", [1, 100, 10**6])
def test_parquet(tmp_path, compression, rows):
  pq.write_table(table(), tmp_path / "a.parquet", row_group_size=rows, compression=compression)
  assert read(tmp_path / "a.parquet") == TEXTS


@pytest.mark.parametrize(
  "kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=["large", "dictionary"]
)
def test_kinds_of_strings_and_nulls(tmp_path, kind):
  pq.write_table(table(["a", None, "c"], kind), tmp_path / "a.parquet")
  assert read(tmp_path / "a.parquet") == ["a", "", "c"]


def test_an_unknown_column_is_reported_with_those_that_exist(tmp_path):
  pq.write_table(table(), tmp_path / "a.parquet")
  write_dataset(tmp_path / "data", [TEXTS])
  for path in (tmp_path / "a.parquet", tmp_path / "data"):
    with pytest.raises(
      ValueError,
      match=r"'body' does not exist; the file has id \(int64\), text \(string\)\. Choose",
    ):
      read(path, "body")
    with pytest.raises(ValueError, match="'id' does not hold strings; the file has id"):
      read(path, "id")


def test_damaged_files_are_named(tmp_path):
  (tmp_path / "a.parquet").write_bytes(b"PAR1 but nothing else")
  with pytest.raises(ValueError, match=r"a\.parquet: .*remove it from the input"):
    read(tmp_path / "a.parquet")
  file = write_dataset(tmp_path / "data", [TEXTS]) / "data-00000-of-00001.arrow"
  file.write_bytes(file.read_bytes()[:-3000])
  with pytest.raises(ValueError, match=r"arrow, row [0-9]+: .*remove it from the input"):
    read(tmp_path / "data")


def test_dataset_folder(tmp_path):
  folder = write_dataset(tmp_path / "data", [TEXTS[:300], TEXTS[300:]])
  # Left over from an earlier save with more shards.
  (folder / "data-00002-of-00003.arrow").write_bytes(b"stale")
  assert read(folder) == TEXTS
  (folder / "data-00001-of-00002.arrow").unlink()
  with pytest.raises(ValueError, match=r"data lacks data-00001-of-00002\.arrow"):
    read(folder)


def test_dataset_with_splits_asks_for_one(tmp_path):
  for split in ("train", "test"):
    write_dataset(tmp_path / "data" / split, [[split]])
  (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
  for path in (tmp_path / "data", tmp_path):
    with pytest.raises(ValueError, match=r"splits train, test: name one of them, as .*data/train"):
      read(path)
  assert read(tmp_path / "data" / "test") == ["test"]


def test_datasets_of_the_library_itself(tmp_path):
  datasets = pytest.importorskip("datasets", reason="needs the extra eval")
  datasets.disable_progress_bars()
  data = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
  data.select(range(0, len(TEXTS), 2)).save_to_disk(tmp_path / "one", num_shards=3)
  assert read(tmp_path / "one") == TEXTS[::2]
  datasets.DatasetDict(train=data).save_to_disk(tmp_path / "dict")
  assert read(tmp_path / "dict") == TEXTS


def test_the_file_format_of_arrow(tmp_path):
  rows = table()
  with (
    pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
    pa.ipc.new_file(sink, rows.schema) as out,
  ):
    out.write_table(rows, max_chunksize=100)
  assert read(tmp_path / "a.arrow") == TEXTS


def test_several_inputs_and_patterns(tmp_path):
  for name in ("x/a", "x/b", "y/a"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    pq.write_table(table([name]), tmp_path / f"{name}.parquet")
  (tmp_path / "x" / "note.jsonl").write_text('{"text": "note"}\n')
  assert read(str(tmp_path / "*" / "a.parquet")) == ["x/a", "y/a"]
  assert read(tmp_path / "x") == ["x/a", "x/b", "note"]
  several = [tmp_path / "y", tmp_path / "x" / "a.parquet", tmp_path / "y" / "a.parquet"]
  sources, _ = find_sources(several)
  assert [source.name for source in sources] == [
    str(tmp_path / "x" / "a.parquet"),
    str(tmp_path / "y" / "a.parquet"),
  ]
  with pytest.raises(FileNotFoundError, match=r"\*\.csv matches no file"):
    find_sources(str(tmp_path / "*.csv"))


def test_a_corpus_does_not_depend_on_the_format(tmp_path):
  (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in TEXTS))
  pq.write_table(table(), tmp_path / "a.parquet", row_group_size=50)
  write_dataset(tmp_path / "data", [TEXTS])
  found = []
  for i, source in enumerate(("a.jsonl", "a.parquet", "data")):
    out = tmp_path / f"out{i}"
    prepare(tmp_path / source, out, load_tokenizer("bytes"), validation=0.1)
    corpus = open_corpus(out)
    assert corpus.manifest.dropped == 1
    found.append([(out / f"{shard.name}.bin").read_bytes() for shard in corpus.train.info.shards])
  assert found[0] == found[1] == found[2]


STREAM = """
import pathlib, sys
import pyarrow as pa
from deltanet_jax.data.corpus import arrow
total = sum(len(text) for _, text in arrow.texts(pathlib.Path(sys.argv[1]), "text"))
print(total, pa.default_memory_pool().max_memory())
"""


@pytest.mark.parametrize("kind", ["row groups", "one row group", "arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
  """The peak of pyarrow's memory pool for 16 and 64 MB of text is the same, a few MB."""
  peaks = {}
  for megabytes in (16, 64):
    texts = [f"{i} " + "x" * 16_000 for i in range(megabytes * 64)]
    if kind == "arrow":
      path = write_dataset(tmp_path / f"{megabytes}", [texts]) / "data-00000-of-00001.arrow"
    else:
      path = tmp_path / f"{megabytes}.parquet"
      rows = 256 if kind == "row groups" else len(texts)
      # Without dictionary and compression the file is as large as its text.
      options = dict(compression="none", use_dictionary=False, data_page_size=1 << 18)
      pq.write_table(table(texts), path, row_group_size=rows, write_batch_size=16, **options)
    assert path.stat().st_size > megabytes * 10**6
    done = subprocess.run(
      [sys.executable, "-c", STREAM, path], capture_output=True, text=True, check=True
    )
    total, peaks[megabytes] = map(int, done.stdout.split())
    assert total == sum(map(len, texts))
  assert peaks[64] < 1.5 * peaks[16] and peaks[64] < 16e6, peaks


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  (tmp_path / "a.parquet").write_bytes(b"PAR1")
  with pytest.raises(
    ImportError, match=r"Reading a\.parquet needs the extra `parquet`.*deltanet-jax\[parquet\]"
  ):
    list(arrow.texts(tmp_path / "a.parquet", "text"))
