"""Prompts of `generate` from files and standard input."""

import io
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.lib import prompts, provenance


@pytest.fixture
def read(monkeypatch):
  """Calls a function of `prompts` with these flags and this standard input."""

  def call(function, stdin=b"", **values):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    function.cache_clear()
    with flagsaver.flagsaver(**values):
      return function()

  parsed = flags.FLAGS.is_parsed()
  flags.FLAGS.mark_as_parsed()
  yield call
  if not parsed:
    flags.FLAGS.unparse_flags()


def test_texts(tmp_path, read):
  one, many = tmp_path / "one.txt", tmp_path / "many.jsonl"
  one.write_bytes("It is é\n\ntruth \r\n".encode())
  many.write_text('{"text": "a"}\n\n{"text": "b\\n"}\n')
  files = [str(one), "-", str(many)]
  found = read(prompts.texts, b"from stdin\n", text_file=files)
  assert found == ["It is é\n\ntruth ", "from stdin", "a", "b\n"]
  assert read(prompts.texts, text_file=[str(one)], lines=True) == ["It is é", "truth "]
  assert read(prompts.texts) == []


def test_token_ids(tmp_path, read):
  (tmp_path / "ids").write_text("5,9\n\n 7\n")
  found = read(prompts.token_ids, b"1, 2\n", prompt_file=[str(tmp_path / "ids"), "-"])
  assert found == ["5,9", "7", "1, 2"]


@pytest.mark.parametrize(
  "stdin, values, message",
  [
    (b"\n", dict(text_file=["-"]), "--text_file=-: standard input is empty"),
    (b"\xff", dict(text_file=["-"]), "--text_file=-: standard input is not UTF-8"),
    (b"a", dict(text_file=["-", "-"]), "--text_file=- is given twice"),
    (b"a", dict(lines=True), "--lines needs --text_file"),
  ],
)
def test_errors(read, stdin, values, message):
  with pytest.raises(ValueError, match=message):
    read(prompts.texts, stdin, **values)


def test_errors_of_files(tmp_path, read):
  (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
  with pytest.raises(ValueError, match=r"a\.jsonl, prompt 2 is not an object"):
    read(prompts.texts, text_file=[str(tmp_path / "a.jsonl")])
  with pytest.raises(FileNotFoundError):
    read(prompts.texts, text_file=[str(tmp_path / "nothing")])


@pytest.mark.slow
def test_generate_reads_standard_input():
  command = [sys.executable, "-m", "experiments.generate", "--prompt_file=-", "--max_new=2"]
  done = subprocess.run(
    command, input="5,9\n7\n", cwd=provenance.CHECKOUT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert [line.split(" ->")[0] for line in done.stdout.splitlines()[:2]] == ["[5, 9]", "[7]"]
