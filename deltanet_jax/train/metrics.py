"""Metrics of a run: JSON lines, TensorBoard, throughput and model FLOPs utilization (MFU)."""

import itertools
import json
import math
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp

from deltanet_jax import chips
from deltanet_jax._extras import require
from deltanet_jax.files import write_text
from deltanet_jax.models import summarize
from deltanet_jax.object_storage import ObjectPath
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
  """TensorBoard event writer without a thread, so that a full disk raises in the caller.

  On object storage, which cannot append, events go to a temporary file that `sync` uploads.
  """

  def __init__(self, folder: pathlib.Path, first_step: int):
    require("Writing TensorBoard events", "tensorboardX")
    from tensorboardX import event_file_writer, proto, summary

    self._remote = self._temporary = None
    if isinstance(folder, ObjectPath):
      self._remote, self._temporary = folder, tempfile.TemporaryDirectory()
      folder = pathlib.Path(self._temporary.name)
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

  def sync(self):
    if self._remote is not None:
      for path in pathlib.Path(self._temporary.name).iterdir():
        (self._remote / path.name).write_bytes(path.read_bytes())

  def close(self):
    self._writer.close()
    if self._remote is not None:
      self.sync()
      self._temporary.cleanup()


class _Lines:
  """A text file on object storage, which cannot append: rewritten by `sync`."""

  def __init__(self, path: ObjectPath):
    self._path = path
    self._text = path.read_text() if path.exists() else ""
    self._saved = self._text

  def write(self, line: str):
    self._text += line

  def flush(self):
    """Do nothing: see `sync`."""

  def sync(self):
    if self._text != self._saved:
      self._path.write_text(self._text)
      self._saved = self._text

  def close(self):
    self.sync()


class Log:
  """Metrics by step, as JSON lines and TensorBoard events; only process 0 writes.

  On the local disk every line is written at once. On object storage lines are written by `sync` and
  `close`: a killed run loses those after its last checkpoint or evaluation, which it repeats.
  """

  def __init__(self, workdir: pathlib.Path, first_step: int):
    self._file = self._board = None
    if jax.process_index() != 0:
      return
    path = workdir / FILE
    self._truncate(path, first_step)
    self._file = _Lines(path) if isinstance(path, ObjectPath) else path.open("a")
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

  def sync(self):
    """Make all lines durable on object storage; call it before a checkpoint."""
    if isinstance(self._file, _Lines):
      self._file.sync()
      self._board.sync()

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
