"""Host memory does not grow over two thousand updates."""

import concurrent.futures
import ctypes
import gc
import json
import multiprocessing
import pathlib

import numpy as np
import pytest

from deltanet_jax.train import metrics
from tests.support.training import tiny, train_on


def resident_megabytes(corpus, workdir) -> dict[int, float]:
  """Return resident memory by step, over a run of two thousand updates."""
  resident, write = {}, metrics.Log.write

  def measured(self, step, values):
    # Free pages that the allocator retains are not a leak.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    resident[step] = pages * 4096 / 2**20
    write(self, step, values)

  metrics.Log.write = measured
  cfg = tiny(tokens=2000 * 256, eval_every=500, log_every=20)
  cfg.checkpoint.every = 250
  train_on(corpus, cfg, workdir)
  return resident


@pytest.mark.slow
def test_memory_is_flat(corpus, tmp_path):
  # In a separate process: memory of other tests is freed at arbitrary times.
  spawn = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
    resident = pool.submit(resident_megabytes, corpus, tmp_path / "run").result()
  rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
  speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
  early, late = (np.median(part) for part in np.array_split(speeds, 2))
  print(f"MB at steps {resident}; tokens/s, first and second half: {early:.0f} {late:.0f}")
  # Between checkpoints it is constant to 0.1 MB; a checkpoint or an evaluation changes it by up to
  # 10 MB. Medians and this tolerance detect a leak of 15 kB per update.
  at = lambda low, high: np.median([mb for step, mb in resident.items() if low <= step <= high])
  assert at(1600, 2000) - at(500, 900) < 16
