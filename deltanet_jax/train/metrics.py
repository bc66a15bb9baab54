"""Metrics of a run: JSON lines, TensorBoard, throughput and model FLOPs utilization (MFU)."""

import itertools
import json
import math
import pathlib
import time

import jax
import jax.numpy as jnp

from deltanet_jax import chips
from deltanet_jax._extras import require
from deltanet_jax.files import write_text
from deltanet_jax.models import summarize
from deltanet_jax.train.step import Trainer

FILE = "metrics.jsonl"
_BOARD = "tensorboard"


def peak_flops(device) -> float | None:
  """Return peak FLOP/s of one device; for a CPU, those of a measured large matmul."""
  if chip := chips.find(device.device_kind):
    return chip.peak_flops
  return _measure_matmul_flops() / len(jax.local_devices()) if device.platform == "cpu" else None


def _measure_matmul_flops(n: int = 1024) -> float:
  x = jnp.ones((n, n), jnp.float32)
  matmul = jax.jit(jnp.matmul)
  best = float("inf")
  for _ in range(4):
    start = time.perf_counter()
    matmul(x, x).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2 * n**3 / best


def set_aside(workdir: pathlib.Path):
  """Rename the metrics of a run that starts from scratch to the next free name."""
  for name, suffix in ((FILE, ".jsonl"), (_BOARD, "")):
    old = workdir / name
    free = (old.with_name(f"{old.stem}.{n}{suffix}") for n in itertools.count(1))
    if old.exists():
      old.rename(next(path for path in free if not path.exists()))


class _Board:
  """TensorBoard event writer without a thread, so that a full disk raises in the caller."""

  def __init__(self, folder: pathlib.Path, first_step: int):
    require("Writing TensorBoard events", "tensorboardX")
    from tensorboardX import event_file_writer, proto, summary

    folder.mkdir(exist_ok=True)
    self._proto, self._summary = proto.event_pb2, summary
    self._writer = event_file_writer.EventsWriter(str(folder / "events"))
    # Makes TensorBoard discard events of later steps that an interrupted run wrote.
    start = self._proto.SessionLog(status=self._proto.SessionLog.START)
    self._add(step=first_step, session_log=start)

  def _add(self, **fields):
    self._writer.write_event(self._proto.Event(wall_time=time.time(), **fields))

  def write(self, step: int, values: dict):
    for name, value in values.items():
      self._add(step=step, summary=self._summary.scalar(name, value))
    self._writer.flush()

  def close(self):
    self._writer.close()


class Log:
  """Metrics by step, as JSON lines and TensorBoard events; only process 0 writes."""

  def __init__(self, workdir: pathlib.Path, first_step: int):
    self._file = self._board = None
    if jax.process_index() != 0:
      return
    path = workdir / FILE
    self._truncate(path, first_step)
    self._file = path.open("a")
    self._board = _Board(workdir / _BOARD, first_step)

  @staticmethod
  def _truncate(path, step):
    """Drop metrics after the last checkpoint: those updates will be repeated."""
    if not path.exists():
      return
    lines = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    write_text(path, "".join(line + "\n" for line in lines))

  def write(self, step: int, values: dict):
    if self._file is None:
      return
    # Neither JSON nor TensorBoard represents non-finite values.
    finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
    self._file.write(json.dumps({"step": step} | finite) + "\n")
    self._file.flush()
    self._board.write(step, {name: x for name, x in finite.items() if x is not None})

  def close(self):
    if self._file is not None:
      self._file.close()
      self._board.close()


def _step_of(line: str) -> int:
  """Return the step of a line; an incomplete last line has an infinite one."""
  try:
    return json.loads(line)["step"]
  except (ValueError, KeyError):
    return 1 << 62


class Meter:
  """Throughput since the previous call, in tokens/s and MFU."""

  def __init__(self, trainer: Trainer):
    cfg = trainer.cfg
    self._tokens = cfg.data.batch * cfg.data.length
    # The backward pass costs twice the forward pass.
    self._flops = 3 * summarize(cfg.model, cfg.data.length).flops
    peak = peak_flops(trainer.mesh.devices.flat[0])
    self._peak = None if peak is None else peak * trainer.mesh.size
    self._step = None

  def restart(self, step: int):
    self._step, self._start = step, time.perf_counter()

  def rates(self, step: int) -> dict[str, float]:
    before, now = self._step, time.perf_counter()
    started = None if before is None else self._start
    self.restart(step)
    if before is None or step <= before:
      return {}
    rate = (step - before) * self._tokens / (now - started)
    rates = dict(tokens_per_second=rate)
    return rates if self._peak is None else rates | dict(mfu=rate * self._flops / self._peak)
