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


def truncate_part(workdir, step, rank):
  """Cuts what one process wrote of the weights."""
  folder = workdir / f"checkpoints/{step}/weights/ocdbt.process_{rank}/d"
  files = [path for path in folder.iterdir() if path.is_file()]
  assert files
  for path in files:
    path.write_bytes(path.read_bytes()[:10])


# What the first process says it found: a process reads its own part alone.
FOUND = {
  "flipped": "the checksum of its weights is",
  "part 0": "a file is truncated",
  "part 1": "another process found its part damaged",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FOUND)
def test_a_damaged_checkpoint_is_passed_over_by_both(corpus, whole, tmp_path, how):
  workdir = shutil.copytree(whole, tmp_path / "run")
  if how == "flipped":
    damage(workdir, 12, how)
  else:
    truncate_part(workdir, 12, how.removeprefix("part "))
  outputs = [finish(process) for process in start(corpus, workdir)]
  assert f"checkpoint 12 is damaged ({FOUND[how]}" in outputs[0], outputs[0]
  assert "resuming from step 8 of 12" in outputs[0], outputs[0]
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
