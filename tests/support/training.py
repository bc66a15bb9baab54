"""A tiny training run shared by the tests, in this process and in subprocesses."""

import dataclasses
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys

from deltanet_jax.config import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig
from deltanet_jax.data import CorpusTask
from deltanet_jax.eval import Validation
from deltanet_jax.models import preset
from deltanet_jax.train import train
from deltanet_jax.train.preemption import Stop

ROOT = pathlib.Path(__file__).parents[2]
silent = functools.partial(train, report=lambda _: None)


def tiny(**changes) -> TrainConfig:
  """Return the configuration of 12 updates of a 2-layer model, with some fields changed."""
  cfg = TrainConfig(
    model=preset("deltanet-tiny", vocab=260, depth=2, width=32, mlp_multiple=32),
    data=DataConfig(length=32, batch=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_tokens=3 * 256),
    checkpoint=CheckpointConfig(every=4, keep=2),
    tokens=12 * 256,
    loss_chunk=16,
    log_every=1,
    eval_every=6,
  )
  return dataclasses.replace(cfg, **changes)


def train_on(corpus, cfg, workdir, **options):
  """Train on a corpus with its validation split, without console output."""
  task = CorpusTask(corpus, length=cfg.data.length, batch=cfg.data.batch, seed=cfg.seed)
  evaluators = [Validation(task, cfg.eval_batches)]
  return silent(cfg, workdir, task, evaluators=evaluators, **options)


def numbers(workdir) -> list[dict]:
  """Return the metrics that must be equal in two runs: all except speeds."""
  speeds = ("tokens_per_second", "mfu")
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if k not in speeds} for line in lines]


def damage(workdir, step, how):
  """Corrupt the largest file of a checkpoint."""
  files = [p for p in (workdir / f"checkpoints/{step}/weights").rglob("*") if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  match how:
    case "truncated":
      os.truncate(largest, largest.stat().st_size // 2)
    case "deleted":
      largest.unlink()
    case "flipped":
      content = bytearray(largest.read_bytes())
      content[len(content) // 2] ^= 1
      largest.write_bytes(content)


def stop_at(monkeypatch, step, how):
  """Call `how` inside the training loop after this update has been dispatched."""
  asked = Stop.asked

  def hooked(self, now):
    if now == step:
      how()
    return asked(self, now)

  monkeypatch.setattr(Stop, "asked", hooked)


def launch(words, devices=1, cache=None, by=()) -> subprocess.Popen:
  """Start a Python subprocess with simulated devices.

  Args:
    words: arguments of the Python interpreter.
    cache: directory of a persistent compilation cache.
    by: command that runs the interpreter, such as ("timeout", "60").
  """
  env = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
  }
  if cache:
    env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  return subprocess.Popen(
    [*by, sys.executable, *words],
    cwd=ROOT,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def wait_for_exit(process, code=0, *, timeout: float = 500) -> str:
  """Wait for a subprocess, check its exit code and return its output."""
  try:
    output, _ = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    process.communicate()
    raise
  assert process.returncode == code, output
  return output


def train_words(corpus, workdir, *more) -> list[str]:
  """Return the command line of the tiny run."""
  config = "--config=tests/support/tiny_config.py"
  words = ["-m", "experiments.train", config, f"--workdir={workdir}", *more]
  return [*words, f"--config.data.corpus={corpus.train.folder}"]


def free_address() -> str:
  """Return a `--coordinator` flag with a free port."""
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return f"--coordinator=localhost:{s.getsockname()[1]}"
