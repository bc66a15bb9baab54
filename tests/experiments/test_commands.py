"""Commands with wrong input print one sentence and exit with code 1; Ctrl-C exits with 130."""

import errno
import subprocess
import sys

import pytest

from deltanet_jax import files
from deltanet_jax.interop import save_fla
from deltanet_jax.models import build, preset
from experiments.lib import provenance
from tests.data.test_tokenizer import hugging_face
from tests.experiments.errors import errors_of


def start(*words, before="true"):
  """Run a command, after a command of the shell."""
  command = ["bash", "-c", f'{before}; exec "$@"', "-", sys.executable, "-m", *words]
  return subprocess.run(
    command, cwd=provenance.CHECKOUT, capture_output=True, text=True, check=False
  )


def sentence(done) -> str:
  """The last line of stderr, after progress bars."""
  assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
  return done.stderr.strip().splitlines()[-1]


def test_generate_rejects_wrong_flags():
  expected = {
    "--text=hello": "--text needs a trained model: --workdir=RUN",
    "--prompt=5,9 --top_k=3": "top_k is 3, but temperature 0 is greedy",
    "--prompt=five": "--prompt is 'five', expected token ids like 5,9,2",
    "--text=a --tokenizer=bytes": "the tokenizer has 258 ids, more than the 256",
    "--prompt=999": "token id 999 is outside the vocabulary of 256",
  }
  found = errors_of("experiments.generate", [words.split() for words in expected])
  for message, start_of_message in zip(found, expected.values(), strict=True):
    assert message.startswith(start_of_message)


@pytest.mark.slow
def test_a_checkpoint_is_decoded_with_its_own_tokenizer(tmp_path):
  folder = tmp_path / "fla"
  save_fla(build(preset("deltanet-tiny", vocab=1000, depth=1)), folder)
  run = lambda *words: start(
    "experiments.generate", f"--checkpoint={folder}", "--max_new=4", *words
  )
  assert "the tokenizer of this model is unknown" in sentence(run("--text=a"))
  wrong = sentence(run("--text=a", "--tokenizer=bytes"))
  assert "258 ids, far fewer than the 1000 of the model: --tokenizer=bytes is not" in wrong
  shown = run("--prompt=5,9").stdout
  assert shown.startswith("[5, 9] -> [")
  save_fla(build(preset("deltanet-tiny", vocab=320, depth=1)), tmp_path / "small")
  folder = tmp_path / "small"
  hugging_face(folder)
  done = run("--text=Hello")
  assert done.returncode == 0 and done.stdout.startswith("Hello"), done.stderr


def test_evaluate_checks_its_flags_before_it_loads_a_model():
  wrong = ("--contexts=1,a", "--out=README.md/out")
  contexts, out = errors_of("experiments.evaluate", [["--workdir=nowhere", x] for x in wrong])
  assert contexts == "--contexts is 1,a, expected positive integers like 1,2,4,8."
  assert "Not a directory" in out and "README.md/out" in out


def test_a_folder_that_cannot_be_written_is_rejected(tmp_path, monkeypatch):
  files.check_writable(tmp_path / "new/folder")
  assert not (tmp_path / "new").exists()

  def read_only(**_):
    raise OSError(errno.EROFS, "Read-only file system")

  monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
  with pytest.raises(OSError, match=r"out cannot be written \(Read-only file system\)"):
    files.check_writable(tmp_path / "out")


# Runs a command in which one function is replaced by Ctrl-C.
INTERRUPTED = """
import importlib, os, runpy, signal, sys, time
module, name, command = sys.argv[1:4]
def interrupt(*_, **__):
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(60)
setattr(importlib.import_module(module), name, interrupt)
del sys.argv[1:4]
runpy.run_module(command, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
  "module, function, words",
  [
    ("deltanet_jax.generate", "generate", ["experiments.generate", "--prompt=5,9"]),
    ("experiments.lib.evaluation", "open_run", ["experiments.evaluate", "--workdir=any"]),
  ],
)
def test_ctrl_c_prints_one_line_and_exits_with_130(module, function, words):
  command = [sys.executable, "-c", INTERRUPTED, module, function, *words]
  done = subprocess.run(command, cwd=provenance.CHECKOUT, capture_output=True, text=True)
  name = words[0].removeprefix("experiments.")
  assert (done.returncode, done.stderr.splitlines()[-1]) == (130, f"{name}: interrupted")
  assert "Traceback" not in done.stderr


def test_prepare_data_rejects_two_validation_splits(tmp_path):
  words = ("--validation=0.1", "--validation_input=x", f"--output={tmp_path}/out")
  assert sentence(start("experiments.prepare_data", *words)) == (
    "prepare_data: --validation and --validation_input exclude each other: set one of them."
  )


def test_prepare_data_on_a_full_disk(tmp_path):
  words = ("experiments.prepare_data", f"--output={tmp_path}/out")
  message = sentence(start(*words, before="ulimit -f 100"))
  assert message.startswith(
    f"prepare_data: {tmp_path}/out cannot be read or written (File too large)"
  )
  done = start(*words)
  assert done.returncode == 0 and "all checksums" in done.stdout
