"""A run killed repeatedly ends bitwise identical to an uninterrupted one."""

import random
import signal
import time

import jax
import numpy as np
import pytest

from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.step import make_trainer
from experiments.lib.exit_codes import PREEMPTED
from tests.support.training import free_address, launch, numbers, tiny, train_words, wait_for_exit

STEPS = 400
# Frequent checkpoints, so that many kills happen during a save.
OFTEN = [
  f"--config.tokens={STEPS * 256}",
  "--config.checkpoint.every=3",
  "--config.eval_every=1000",
]


def final_state(workdir):
  return Checkpoints(workdir, tiny().checkpoint).restore(make_trainer(tiny()).state_shapes())


@pytest.mark.slow
def test_sigkill(corpus, tmp_path):
  cache, kills, during_save = tmp_path / "cache", 0, 0
  start = lambda name: launch(train_words(corpus, tmp_path / name, *OFTEN), cache=cache)
  wait_for_exit(start("uninterrupted"))
  rng, reached = random.Random(0), []
  checkpoints = tmp_path / "killed/checkpoints"
  while kills < 24:
    process = start("killed")
    before = max((int(p.name) for p in checkpoints.glob("[0-9]*") if p.name.isdigit()), default=0)
    # Wait for progress, then a random time; half of the kills wait for a save to start.
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
      done = max((int(p.name) for p in checkpoints.glob("*") if p.name.isdigit()), default=0)
      if done > before:
        break
      time.sleep(0.02)
    time.sleep(rng.random() * 0.3)
    if kills % 2:
      while process.poll() is None and not list(checkpoints.glob("*tmp*")):
        time.sleep(0.0005)
    if process.poll() is not None:
      break  # training is complete
    during_save += bool(list(checkpoints.glob("*tmp*")))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kills += 1
    reached.append(max(int(p.name) for p in checkpoints.glob("*") if p.name.isdigit()))
  print(f"{kills} kills, {during_save} of them during a save, last checkpoints: {reached}")
  assert kills >= 20 and during_save >= 5
  assert reached == sorted(reached)
  wait_for_exit(start("killed"))
  assert numbers(tmp_path / "killed") == numbers(tmp_path / "uninterrupted")
  (state, meta), (expected, expected_meta) = (
    final_state(tmp_path / n) for n in ("killed", "uninterrupted")
  )
  assert meta == expected_meta
  jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_stops_both(corpus, tmp_path):
  address, cache = free_address(), tmp_path / "cache"
  more = [address, "--processes=2", "--config.mesh.data=2", *OFTEN]
  processes = [
    launch(train_words(corpus, tmp_path / "run", *more, f"--rank={rank}"), cache=cache)
    for rank in range(2)
  ]
  deadline = time.time() + 200
  while time.time() < deadline and not (tmp_path / "run/checkpoints/3").exists():
    time.sleep(0.05)
  processes[1].send_signal(signal.SIGTERM)
  for process in processes:
    wait_for_exit(process, PREEMPTED)
  output = wait_for_exit(launch(train_words(corpus, tmp_path / "run", *OFTEN), cache=cache))
  assert "resuming from step" in output
