"""Two processes agree which checkpoint is damaged, and that an I/O error is not damage."""

import shutil

import pytest

from deltanet_jax.train import saved_steps
from tests.support.training import damage, free_address, launch, numbers, train_words, wait_for_exit

# Each process holds, writes and reads half of every weight (FSDP).
SPLIT = ["--processes=2", "--config.mesh.data=1", "--config.mesh.fsdp=2"]


def start(corpus, workdir, *, second=("-m", "experiments.train")):
  """Start both processes, the second with another command."""
  words = train_words(corpus, workdir, free_address(), *SPLIT)[2:]
  commands = [("-m", "experiments.train"), second]
  return [launch([*command, *words, f"--rank={r}"]) for r, command in enumerate(commands)]


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("multihost") / "run"
  for process in start(corpus, workdir):
    wait_for_exit(process)
  return workdir


def truncate_part(workdir, step, rank):
  """Truncate the files of the weights that one process wrote."""
  folder = workdir / f"checkpoints/{step}/weights/ocdbt.process_{rank}/d"
  files = [path for path in folder.iterdir() if path.is_file()]
  assert files
  for path in files:
    path.write_bytes(path.read_bytes()[:10])


# Message of the first process; a process reads only its own part.
FOUND = {
  "flipped": "the checksum of its weights is",
  "part 0": "a file is truncated",
  "part 1": "another process found its part damaged",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FOUND)
def test_both_skip_a_damaged_checkpoint(corpus, uninterrupted, tmp_path, how):
  workdir = shutil.copytree(uninterrupted, tmp_path / "run")
  if how == "flipped":
    damage(workdir, 12, how)
  else:
    truncate_part(workdir, 12, how.removeprefix("part "))
  outputs = [wait_for_exit(process) for process in start(corpus, workdir)]
  assert f"checkpoint 12 is damaged ({FOUND[how]}" in outputs[0], outputs[0]
  assert "resuming from step 8 of 12" in outputs[0], outputs[0]
  assert all("Traceback" not in output for output in outputs), outputs
  assert (workdir / "damaged/12").exists() and saved_steps(workdir) == [8, 12]
  assert numbers(workdir) == numbers(uninterrupted)


@pytest.mark.slow
def test_an_io_error_of_one_stops_both(corpus, uninterrupted, tmp_path):
  workdir = shutil.copytree(uninterrupted, tmp_path / "run")
  worker = ("-m", "tests.support.train_worker", "fail_read")
  outputs = [wait_for_exit(process, 1) for process in start(corpus, workdir, second=worker)]
  assert "another process could not read its part of the checkpoint; try again." in outputs[0]
  assert "Input/output error" in outputs[1]
  assert not (workdir / "damaged").exists() and saved_steps(workdir) == [8, 12]
