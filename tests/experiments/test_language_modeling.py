"""The small language-model table: equal model sizes, corpus, table and figure."""

import struct
import zlib

import pytest

from deltanet_jax.data import load_tokenizer
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.models import count_parameters
from experiments.configs import language_modeling as small
from experiments.lib import debian_texts
from experiments.plots import __main__ as plots
from experiments.plots import language_modeling as plot
from tests.experiments.test_plots import PROVENANCE


def test_all_models_have_the_same_size():
  counts = {row: count_parameters(small.model(row)) for row in small.MODELS}
  assert counts["mamba"] == small.PARAMETERS
  assert max(abs(x / small.PARAMETERS - 1) for x in counts.values()) < 1e-3
  assert set(plot.NAMES) == set(small.MODELS) and set(small.MAIN) < set(small.MODELS)
  # All rows of table 1 and its ablations; L2 with SiLU is DeltaNet itself.
  assert set(small.PAPER) - {"l2-silu"} <= set(small.MODELS)


def test_a_row_needs_the_corpus(tmp_path, monkeypatch):
  monkeypatch.setattr(small, "CORPUS", str(tmp_path / "corpus"))
  row = next(x for x in small.ROWS if x.key["model"] == "deltanet")
  with pytest.raises(ValueError, match=r"there is no corpus in .*: run `make corpus` first"):
    row.make(row.grid[0], 0)
  (tmp_path / "in.txt").write_text("It is a truth universally acknowledged.\n\n" * 900)
  prepare(tmp_path / "in.txt", tmp_path / "corpus", load_tokenizer("bytes"), validation=0.2)
  made = row.make(row.grid[0], 1)
  made.config.validate()
  assert made.config.steps == small.UPDATES and made.config.seed == 1
  assert made.task.shape == (small.BATCH, small.LENGTH) and len(made.evaluators) == 3
  assert made.settings_hash() != row.make(row.grid[0], 0).settings_hash()


def made_up():
  """Records as written by a sweep."""
  for i, row in enumerate(small.ROWS):
    for seed in row.seeds:
      evaluation = dict(validation_bits_per_byte=2 + i / 50 + seed / 100, recall_gain=0.5)
      evaluation |= dict(recall_accuracy=0.25, recall_bits=3.0)
      if row.key["model"] in small.MAIN:
        for n in (small.LENGTH * x for x in small.MULTIPLES):
          evaluation |= {f"loss_{n}": 1.5, f"loss_{n}_from_0": 2.0, f"loss_{n}_from_16": 1.4}
      metrics = dict(evaluation=evaluation, parameters=570_912, of=1500, seconds=300.0)
      yield dict(key=row.run_key(row.grid[0], seed), metrics=metrics, provenance=PROVENANCE)


def test_the_table_has_the_values_of_the_paper():
  rows = list(made_up())
  text = plots.document("language_modeling", rows)
  (line,) = [x for x in text.splitlines() if x.startswith("| DeltaNet  ")][:1]
  assert "28.24" in line and "26.4" in line and "0.50 (0.50 to 0.50)" in line
  assert "pairs of models" in text and "## Longer contexts" in text
  assert all(x.count("|") <= 10 for x in text.splitlines() if x.startswith("|"))
  assert len(plot.figure(rows).axes) == 3 and plot.figure([]) is None


def test_parse_sword_module(tmp_path):
  """Two compressed blocks, and their text without markup."""
  books = [
    '<chapter n="1"/><title>Emma</title>She was <w lemma="x">clever</w>,<note>so it is'
    " said</note> and\xa0rich.<lb/>  And <hi>kind</hi> &amp; quiet.",
    "<div/>¶ The end.",
  ]
  packed = [zlib.compress(book.encode()) for book in books]
  (tmp_path / "ot.bzz").write_bytes(b"".join(packed))
  sizes = [len(x) for x in packed]
  entries = [(0, sizes[0], 0), (0, 0, 0), (sizes[0], sizes[1], 0)]
  (tmp_path / "ot.bzs").write_bytes(b"".join(struct.pack("<III", *x) for x in entries))
  texts = list(debian_texts.sword_texts(tmp_path / "ot.bzs"))
  assert texts == ["She was clever, and rich.\nAnd kind & quiet.", "The end."]


def test_parse_r_database(tmp_path):
  """A serialized vector of strings, after a value that is not a vector of strings."""
  lines = ["CHAPTER I", "", "Emma was", "clever.", "", "The end."]
  head = b"X\n" + struct.pack(">IIII", 3, 0x40201, 0x30500, 5) + b"UTF-8"
  text = lambda x: struct.pack(">II", 0x40009, len(x)) + x.encode()
  values = [
    head + struct.pack(">II", 13, 0),
    head + struct.pack(">II", 16, len(lines)) + b"".join(map(text, lines)),
  ]
  packed = [struct.pack(">I", len(x)) + zlib.compress(x) for x in values]
  (tmp_path / "Rdata.rdb").write_bytes(b"".join(packed))
  assert list(debian_texts.r_texts(tmp_path / "Rdata.rdb")) == [
    "CHAPTER I\nEmma was clever.\nThe end."
  ]


def test_pieces_contain_the_full_text():
  text = "".join(f"Line {i} of a text.\n" for i in range(4000))
  pieces = list(debian_texts.pieces(text))
  assert "".join(pieces) == text and len(pieces) == 6
  assert all(piece.endswith("\n") for piece in pieces)


def test_without_apt(monkeypatch):
  monkeypatch.setattr(debian_texts.shutil, "which", lambda program: None)
  with pytest.raises(ValueError, match=r"apt-get is not installed.*with --shipped"):
    next(debian_texts.fetch())
