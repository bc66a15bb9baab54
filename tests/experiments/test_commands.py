"""Commands on wrong or awkward input: one sentence each, and the exit code 1."""

import subprocess
import sys

import pytest

from deltanet_jax.interop import save_fla
from deltanet_jax.models import build, preset
from experiments.lib import provenance
from tests.data.test_tokenizer import hugging_face


def start(*words, before="true"):
  """A command, after one of the shell's."""
  command = ["bash", "-c", f'{before}; exec "$@"', "-", sys.executable, "-m", *words]
  return subprocess.run(
    command, cwd=provenance.CHECKOUT, capture_output=True, text=True, check=False
  )


def sentence(done) -> str:
  """The only line of an error besides bars of progress."""
  assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
  return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
  "words, said",
  [
    (["--text=hello"], "generate: --text needs a trained model: --workdir=RUN"),
    (["--prompt=5,9", "--top_k=3"], "generate: top_k is 3, but temperature 0 is greedy"),
    (["--prompt=five"], "generate: --prompt is 'five', expected token ids as 5,9,2"),
    (["--text=a", "--tokenizer=bytes"], "generate: the tokenizer has 258 ids, more than the 256"),
    (["--prompt=999"], "generate: token id 999 is outside the vocabulary of 256"),
  ],
)
def test_generate_refuses(words, said):
  assert sentence(start("experiments.generate", *words)).startswith(said)


@pytest.mark.slow
def test_checkpoints_are_decoded_with_their_own_tokenizer(tmp_path):
  folder = tmp_path / "fla"
  save_fla(build(preset("deltanet-tiny", vocab=1000, depth=1)), folder)
  run = lambda *words: start(
    "experiments.generate", f"--checkpoint={folder}", "--max_new=4", *words
  )
  assert "nothing says how this model's tokens are made" in sentence(run("--text=a"))
  wrong = sentence(run("--text=a", "--tokenizer=bytes"))
  assert "258 ids, far fewer than the 1000 of the model: --tokenizer=bytes is not" in wrong
  shown = run("--prompt=5,9").stdout
  assert shown.startswith("[5, 9] -> [")
  save_fla(build(preset("deltanet-tiny", vocab=320, depth=1)), tmp_path / "small")
  folder = tmp_path / "small"
  hugging_face(folder)
  done = run("--text=Hello")
  assert done.returncode == 0 and done.stdout.startswith("Hello"), done.stderr


def test_prepare_data_refuses_two_ways_of_holding_out(tmp_path):
  words = ("--validation=0.1", "--validation_input=x", f"--output={tmp_path}/out")
  said = sentence(start("experiments.prepare_data", *words))
  assert said == (
    "prepare_data: --validation and --validation_input both say what is held out: give one."
  )


def test_prepare_data_on_a_disk_that_takes_no_more(tmp_path):
  words = ("experiments.prepare_data", f"--output={tmp_path}/out")
  said = sentence(start(*words, before="ulimit -f 100"))
  assert said.startswith(f"prepare_data: {tmp_path}/out cannot be read or written (File too large)")
  done = start(*words)
  assert done.returncode == 0 and "every checksum" in done.stdout
