"""Two processes agree which checkpoint is damaged, and that a disk that fails proves nothing."""

import shutil

import pytest

from deltanet_jax.train import saved_steps
from tests.support.training import damage, finish, free_address, launch, numbers, train_words

# Each process holds, writes and reads half of every weight.
SPLIT = ["--processes=2", "--config.mesh.data=1", "--config.mesh.fsdp=2"]


def start(corpus, workdir, *, second=("-m", "experiments.train")):
  """Both processes, the second started by other words; their output when they have ended."""
  words = train_words(corpus, workdir, free_address(), *SPLIT)[2:]
  commands = [("-m", "experiments.train"), second]
  return [launch([*command, *words, f"--rank={r}"]) for r, command in enumerate(commands)]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("together") / "run"
  for process in start(corpus, workdir):
    finish(process)
  return workdir


def parts(workdir, step):
  """The files of each process in a checkpoint's weights."""
  folder = workdir / f"checkpoints/{step}/weights"
  return [sorted((folder / f"ocdbt.process_{rank}").rglob("*")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncated", "deleted", "flipped", "only one reads it"])
def test_a_damaged_checkpoint_is_passed_over_by_both(corpus, whole, tmp_path, how):
  workdir = shutil.copytree(whole, tmp_path / "run")
  if how == "only one reads it":
    data = [p for p in parts(workdir, 12)[1] if p.is_file() and p.parent.name == "d"]
    for path in data:
      path.write_bytes(path.read_bytes()[:10])
  else:
    damage(workdir, 12, how)
  outputs = [finish(process) for process in start(corpus, workdir)]
  alone = "another process found its part damaged" in outputs[0]
  assert alone == (how == "only one reads it"), outputs[0]
  assert "checkpoint 12 is damaged (" in outputs[0] and "going on from step 8 of 12" in outputs[0]
  assert all("Traceback" not in output for output in outputs), outputs
  assert (workdir / "damaged/12").exists() and saved_steps(workdir) == [8, 12]
  assert numbers(workdir) == numbers(whole)


@pytest.mark.slow
def test_a_disk_that_fails_for_one_stops_both(corpus, whole, tmp_path):
  workdir = shutil.copytree(whole, tmp_path / "run")
  worker = ("-m", "tests.support.train_worker", "fail_read")
  outputs = [finish(process, 1) for process in start(corpus, workdir, second=worker)]
  assert "another process could not read its part of the checkpoint; try again." in outputs[0]
  assert "Input/output error" in outputs[1]
  assert not (workdir / "damaged").exists() and saved_steps(workdir) == [8, 12]
