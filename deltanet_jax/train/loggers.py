"""Where a run's metrics go: JSON lines, TensorBoard, Weights & Biases, or a user's object."""

import itertools
import json
import math
import pathlib
import tempfile
import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from deltanet_jax._extras import require
from deltanet_jax.files import as_path, write_json, write_text
from deltanet_jax.object_storage import ObjectPath

JSON_LINES = "metrics.jsonl"
TENSORBOARD = "tensorboard"
_WANDB = "wandb.json"  # in the workdir: the id of the run at Weights & Biases
# By name, for instance loss, grad_norm and learning_rate of an update.
Metrics = Mapping[str, float | int]


@runtime_checkable
class Logger(Protocol):
  """Receives the metrics of a run: `train(..., loggers=[...])` logs in process 0 only."""

  def log(self, step: int, metrics: Metrics):
    """Log metrics by name after update `step`: of training every `log_every`, or of evaluation.

    A run that resumes repeats the steps after its last checkpoint. Values may be non-finite.
    """

  def close(self):
    """Write everything that is buffered; called once, also when training ends with an error."""


def check_loggers(loggers):
  """Raise ValueError for an object without the methods of a `Logger`."""
  for logger in loggers:
    if isinstance(logger, type) or not isinstance(logger, Logger):
      raise ValueError(
        f"{logger!r} is not a logger: expected an object with log(step, metrics) and close()."
      )


class JsonLines:
  """Append one JSON object per call to metrics.jsonl of a workdir.

  On the local disk every line is written at once. Object storage cannot append: there, `sync` and
  `close` write the file; a killed run loses the lines after its last `sync`.
  """

  def __init__(self, workdir: pathlib.Path, first_step: int):
    """Open the file and drop metrics after `first_step`: a resumed run repeats those updates."""
    path = workdir / JSON_LINES
    if path.exists():
      lines = [line for line in path.read_text().splitlines() if _step_of(line) <= first_step]
      write_text(path, "".join(line + "\n" for line in lines))
    self._file = _RemoteText(path) if isinstance(path, ObjectPath) else path.open("a")

  def log(self, step: int, metrics: Metrics):
    # JSON does not represent non-finite values.
    finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
    self._file.write(json.dumps({"step": step} | finite) + "\n")
    self._file.flush()

  def sync(self):
    """Make all lines durable; call it before a checkpoint."""
    if isinstance(self._file, _RemoteText):
      self._file.sync()

  def close(self):
    self._file.close()


class _RemoteText:
  """A text file on object storage, which cannot append: `sync` writes all of it."""

  def __init__(self, path: ObjectPath):
    self._path = path
    self._text = self._saved = path.read_text() if path.exists() else ""

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


def _step_of(line: str) -> int:
  """Return the step of a line; an incomplete last line has an infinite one."""
  try:
    return json.loads(line)["step"]
  except (ValueError, KeyError):
    return 1 << 62


class TensorBoard:
  """Write TensorBoard events without a thread, so that a full disk raises in the caller.

  On object storage, which cannot append, events go to a temporary file that `sync` uploads.
  """

  def __init__(self, workdir: pathlib.Path, first_step: int):
    require("Writing TensorBoard events", "tensorboardX")
    from tensorboardX import event_file_writer, proto, summary

    folder = workdir / TENSORBOARD
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

  def log(self, step: int, metrics: Metrics):
    for name, value in metrics.items():
      if math.isfinite(value):
        self._add(step=step, summary=self._summary.scalar(name, value))
    self._writer.flush()

  def sync(self):
    """Upload the events to object storage; call it before a checkpoint."""
    if self._remote is not None:
      for path in pathlib.Path(self._temporary.name).iterdir():
        (self._remote / path.name).write_bytes(path.read_bytes())

  def close(self):
    self._writer.close()
    if self._remote is not None:
      self.sync()
      self._temporary.cleanup()


class WandB:
  """Log to Weights & Biases (extra `wandb`); a resumed training run continues the same W&B run.

  The connection opens at the first `log`. `WANDB_MODE=offline` writes to `workdir/wandb` instead,
  for `wandb sync` later.
  """

  def __init__(
    self,
    project: str,
    workdir: str | pathlib.Path,
    *,
    config: Mapping[str, Any] | None = None,
    **options: Any,
  ):
    """Initialize without connecting.

    Args:
      project: name of the W&B project.
      workdir: of the training run; its name is the name of the W&B run.
      config: hyperparameters to show, for instance `deltanet_jax.config.to_json(cfg)`.
      options: further arguments of `wandb.init`, for instance entity, tags or mode.

    Raises:
      MissingExtraError: wandb is not installed.
    """
    require("Logging to Weights & Biases", "wandb")
    self._workdir = as_path(workdir)
    self._options = dict(project=project, name=self._workdir.name, config=config) | options
    self._run = None

  def log(self, step: int, metrics: Metrics):
    if self._run is None:
      self._run = self._open()
    self._run.log(dict(metrics), step=step)

  def _open(self):
    import wandb

    path = self._workdir / _WANDB
    if path.exists():
      stored = json.loads(path.read_text())["id"]
    else:
      stored = uuid.uuid4().hex[:12]
      write_json(path, dict(id=stored))
    options = dict(id=stored, resume="allow")
    if not isinstance(self._workdir, ObjectPath):
      options["dir"] = str(self._workdir.resolve())
    return wandb.init(**options | self._options)

  def close(self):
    if self._run is not None:
      self._run.finish()


def open_loggers(workdir: pathlib.Path, first_step: int) -> list[JsonLines | TensorBoard]:
  """Return the loggers that every run has: metrics.jsonl and TensorBoard."""
  return [JsonLines(workdir, first_step), TensorBoard(workdir, first_step)]


def set_aside(workdir: pathlib.Path):
  """Rename the metrics of a run that starts from scratch to the next free name."""
  for name, suffix in ((JSON_LINES, ".jsonl"), (TENSORBOARD, "")):
    old = workdir / name
    free = (old.with_name(f"{old.stem}.{n}{suffix}") for n in itertools.count(1))
    if old.exists():
      old.rename(next(path for path in free if not path.exists()))
