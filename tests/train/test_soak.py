"""Soak test: readers, SIGTERM, SIGKILL, an I/O error and a flipped bit, for minutes.

The run ends bitwise identical to an uninterrupted one.

SOAK_MINUTES=30 XLA_FLAGS= python -m pytest tests/train/test_soak.py -n 0 -s
"""

import collections
import os
import random
import signal
import threading
import time

import jax
import numpy as np
import pytest

from deltanet_jax.train import load_trained, saved_steps
from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.step import make_trainer
from experiments.lib.exit_codes import PREEMPTED
from tests.support.training import damage, launch, numbers, tiny, train_words, wait_for_exit

MINUTES = float(os.environ.get("SOAK_MINUTES", "5"))
OFTEN = ["--config.tokens=256000000", "--config.checkpoint.every=3", "--config.eval_every=1000000"]


class Readers:
  """Threads that load the newest checkpoint repeatedly."""

  def __init__(self, workdir, count):
    self.steps, self.errors, self._running = [], [], True
    self._threads = [threading.Thread(target=self._read, args=(workdir,)) for _ in range(count)]
    for thread in self._threads:
      thread.start()

  def _read(self, workdir):
    while self._running:
      time.sleep(0.1)
      if saved_steps(workdir):
        try:
          self.steps.append(load_trained(workdir, report=lambda _: None).step)
        except Exception as e:
          self.errors.append(e)

  def stop(self):
    self._running = False
    for thread in self._threads:
      thread.join()


def final_state(workdir):
  return Checkpoints(workdir, tiny().checkpoint).restore(make_trainer(tiny()).state_shapes())


@pytest.mark.slow
def test_soak(corpus, tmp_path):
  workdir, cache, rng = tmp_path / "soak", tmp_path / "cache", random.Random(0)
  words = lambda folder: train_words(corpus, folder, *OFTEN)
  arranged = lambda what, folder: launch(
    ["-m", "tests.support.train_worker", what, *words(folder)[2:]], cache=cache
  )
  readers = Readers(workdir, 2)
  end, codes, faults, outputs = time.time() + 60 * MINUTES, collections.Counter(), [], []
  while time.time() < end or len(faults) < 2:
    if not faults and len(saved_steps(workdir)) > 1:
      before = saved_steps(workdir)
      output = wait_for_exit(arranged("fail_read", workdir), 1)
      assert "Input/output error" in output and "Traceback" not in output, output
      assert saved_steps(workdir) == before and not (workdir / "damaged").exists()
      faults.append("I/O error")
    process = launch(words(workdir), cache=cache)
    kind = rng.choice([signal.SIGTERM, signal.SIGKILL])
    time.sleep(1 + 20 * rng.random())
    process.send_signal(kind)
    outputs.append(wait_for_exit(process, PREEMPTED if kind == signal.SIGTERM else -kind))
    assert "Traceback" not in outputs[-1], outputs[-1]
    codes[process.returncode] += 1
    half = time.time() > end - 30 * MINUTES
    if len(faults) == 1 and half and len(saved_steps(workdir)) > 1:
      damage(workdir, saved_steps(workdir)[-1], "flipped")
      faults.append("flipped bit")
  # Up to a step at which both runs can be compared.
  step = saved_steps(workdir)[-1] + 20
  outputs.append(wait_for_exit(arranged(f"stop_after={step}", workdir), PREEMPTED))
  readers.stop()
  assert not readers.errors, readers.errors[:3]
  assert sum("is damaged (the checksum" in output for output in outputs) == 1
  again = arranged(f"stop_after={step}", tmp_path / "uninterrupted")
  wait_for_exit(again, PREEMPTED, timeout=500 + 60 * MINUTES)
  print(f"exit codes {dict(codes)}, {len(readers.steps)} reads, {step} updates, {faults}")
  assert numbers(workdir) == numbers(tmp_path / "uninterrupted")
  (state, meta), (expected, expected_meta) = map(final_state, (workdir, tmp_path / "uninterrupted"))
  assert meta == expected_meta and meta["step"] == step
  jax.tree.map(np.testing.assert_array_equal, state, expected)
