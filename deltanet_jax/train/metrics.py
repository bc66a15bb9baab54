"""Numbers of a run: JSON lines, TensorBoard, and how much of the hardware was used."""

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
  """Operations per second of one device; of a CPU what a large product reaches now."""
  if chip := chips.find(device.device_kind):
    return chip.peak_flops
  return _measured() / len(jax.local_devices()) if device.platform == "cpu" else None


def _measured(n: int = 1024) -> float:
  x = jnp.ones((n, n), jnp.float32)
  product = jax.jit(jnp.matmul)
  best = float("inf")
  for _ in range(4):
    start = time.perf_counter()
    product(x, x).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2 * n**3 / best


def set_aside(workdir: pathlib.Path):
  """Keeps the numbers of a run that starts anew, under the next free name."""
  for name, suffix in ((FILE, ".jsonl"), (_BOARD, "")):
    old = workdir / name
    free = (old.with_name(f"{old.stem}.{n}{suffix}") for n in itertools.count(1))
    if old.exists():
      old.rename(next(path for path in free if not path.exists()))


class _Board:
  """Numbers for TensorBoard; by no thread, so that a full disk is told to whoever writes."""

  def __init__(self, folder: pathlib.Path, first_step: int):
    require("Writing TensorBoard events", "tensorboardX")
    from tensorboardX import event_file_writer, proto, summary

    folder.mkdir(exist_ok=True)
    self._proto, self._summary = proto.event_pb2, summary
    self._writer = event_file_writer.EventsWriter(str(folder / "events"))
    # What an earlier start has written of later steps does not count.
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
  """Rows of numbers by step; only the first process writes."""

  def __init__(self, workdir: pathlib.Path, first_step: int):
    self._file = self._board = None
    if jax.process_index() != 0:
      return
    path = workdir / FILE
    self._keep_before(path, first_step)
    self._file = path.open("a")
    self._board = _Board(workdir / _BOARD, first_step)

  @staticmethod
  def _keep_before(path, step):
    """Drops what an interrupted run wrote after its last checkpoint: it will be run again."""
    if not path.exists():
      return
    rows = [row for row in path.read_text().splitlines() if _step_of(row) <= step]
    write_text(path, "".join(row + "\n" for row in rows))

  def write(self, step: int, values: dict):
    if self._file is None:
      return
    # JSON has no word for what is not finite, TensorBoard no place.
    finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
    self._file.write(json.dumps({"step": step} | finite) + "\n")
    self._file.flush()
    self._board.write(step, {name: x for name, x in finite.items() if x is not None})

  def close(self):
    if self._file is not None:
      self._file.close()
      self._board.close()


def _step_of(row: str) -> int:
  """The step of a line; a half-written last line counts as beyond every step."""
  try:
    return json.loads(row)["step"]
  except (ValueError, KeyError):
    return 1 << 62


class Meter:
  """Speed since it was last asked."""

  def __init__(self, trainer: Trainer):
    cfg = trainer.cfg
    self._tokens = cfg.data.batch * cfg.data.length
    # The backward costs twice the forward.
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
