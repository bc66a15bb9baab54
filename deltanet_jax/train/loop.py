"""The training loop: train a model of a config on a task, with checkpoints in a workdir."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from tqdm import tqdm

from deltanet_jax import device_batches
from deltanet_jax.config import TrainConfig, to_json
from deltanet_jax.data import Task, training_batches
from deltanet_jax.eval.evaluation import EvalContext, Evaluator, run_evaluators
from deltanet_jax.files import as_path, locked, writing
from deltanet_jax.models.abstract import put_on_mesh
from deltanet_jax.object_storage import ObjectPath
from deltanet_jax.train import memory
from deltanet_jax.train import workdir as folders
from deltanet_jax.train.checkpoint import DAMAGED, Checkpoints, all_damaged
from deltanet_jax.train.checkpoint_reader import saved_steps
from deltanet_jax.train.init_from import InitFrom
from deltanet_jax.train.loggers import Logger, check_loggers, open_loggers, set_aside
from deltanet_jax.train.metrics import Meter
from deltanet_jax.train.optim import learning_rate
from deltanet_jax.train.preemption import Stop
from deltanet_jax.train.step import State, Trainer, make_trainer

# Updates in a profiler trace, counted from the start: the first ones are slower.
_TRACED = range(3, 8)
# Batches at the start that must have scored targets; later ones may have none by chance.
_FULLY_CHECKED = 8


class DivergenceError(Exception):
  """Too many consecutive updates had non-finite gradients."""


def check_start(
  cfg: TrainConfig,
  workdir: str | pathlib.Path,
  *,
  initial: InitFrom | None = None,
  extend: bool = False,
  optimizer: optax.GradientTransformation | None = None,
  trainer: Trainer | None = None,
) -> Trainer:
  """Raise ValueError if this run cannot start or resume in this folder; writes nothing.

  Args:
    initial, extend, optimizer: as in `train`.
    trainer: `make_trainer(cfg, optimizer=optimizer)` if the caller has it; tracing a large model
      takes seconds.

  Returns:
    The trainer, to be passed to `train`.
  """
  if trainer is None:
    trainer = make_trainer(cfg, optimizer=optimizer)
  elif optimizer is not None:
    raise ValueError(
      "optimizer and trainer are both given: pass the optimizer to make_trainer or check_start."
    )
  workdir = as_path(workdir)
  folders.check(
    workdir,
    cfg,
    initial=initial and initial.path,
    extend=extend,
    own_optimizer=trainer.own_optimizer_structure(),
  )
  if initial is not None and not saved_steps(workdir):
    initial.check(cfg.model, trainer.abstract_model.shapes)
  return trainer


def train(
  cfg: TrainConfig,
  workdir: str | pathlib.Path,
  task: Task,
  *,
  evaluators: Sequence[Evaluator] = (),
  loggers: Sequence[Logger] = (),
  optimizer: optax.GradientTransformation | None = None,
  origin: dict | None = None,
  initial: InitFrom | None = None,
  extend: bool = False,
  from_scratch: bool = False,
  profile: bool = False,
  report: Callable[[str], None] = print,
  trainer: Trainer | None = None,
) -> dict[str, float]:
  """Train up to `cfg.tokens`, resuming from the newest checkpoint; return the last evaluation.

  Stops early when an evaluation has `cfg.stop_metric` above `cfg.stop_above`. Config, mesh, workdir
  and task are checked before anything is compiled or written.

  Args:
    evaluators: run every `cfg.eval_every` updates and at the end.
    loggers: receive all metrics, in addition to metrics.jsonl and tensorboard/ of the workdir: any
      objects with the methods of `Logger`. `train` closes them.
    optimizer: an optax optimizer, with its learning rate, schedule, clipping and weight decay, used
      instead of `cfg.optimizer`. Resuming needs the same one: the structure of its state is
      compared with that of the run. `value` (the loss) is passed to its `update`.
    origin: provenance, stored in config.json.
    initial: initial weights of a new run, which starts at step 0 with a new optimizer state. A run
      with a checkpoint resumes from that and does not load them.
    extend: allow a run, finished or not, to continue to a larger `cfg.tokens`. The data continue as
      if it had been started with that number, and so does the learning rate: a cosine schedule
      that had decayed rises again to its value in the longer run.
    from_scratch: start at step 0 if every checkpoint was damaged; False raises ValueError.
    profile: write a profiler trace of a few updates to workdir/profile.
    report: called with one line of text.
    trainer: returned by `check_start`; None: built here.

  Raises:
    ValueError: the run cannot start or resume.
    DivergenceError: too many consecutive updates had non-finite gradients.
    PreemptionError: on SIGTERM, after saving a checkpoint.
    KeyboardInterrupt: on Ctrl-C, after saving a checkpoint.
    OSError: the workdir cannot be read or written.
  """
  workdir, origin = as_path(workdir), origin or {}
  if profile and isinstance(workdir, ObjectPath):
    raise ValueError(f"a profile needs a local workdir, not {workdir}: profile a short local run.")
  with contextlib.ExitStack() as stack:
    check_loggers(loggers)
    stop = stack.enter_context(Stop(workdir))
    for logger in loggers:
      stack.callback(logger.close)
    stack.enter_context(writing(workdir))
    trainer = check_start(
      cfg, workdir, initial=initial, extend=extend, optimizer=optimizer, trainer=trainer
    )
    folders.check_task(workdir, cfg, task)
    if initial is not None and not saved_steps(workdir):
      initial.check_tokenizer(task.describe().get("tokenizer"), task.identity().get("tokenizer"))
    update = trainer.lower_update()
    new = not (workdir / folders.FILE).exists()
    initial_origin = (initial and initial.origin()) if new else folders.initial_origin(workdir)
    if jax.process_index() == 0:
      workdir.mkdir(parents=True, exist_ok=True)
      stack.enter_context(locked(workdir / folders.LOCK, report=report))
      # Again under the lock: another run may have started and ended here meanwhile.
      check_start(cfg, workdir, initial=initial, extend=extend, trainer=trainer)
      structure = trainer.own_optimizer_structure()
      folders.write(workdir, cfg, task, origin, initial_origin, own_optimizer=structure)
    if line := task.remark(cfg.model.vocab):
      report(line)
    checkpoints = Checkpoints(workdir, cfg.checkpoint)
    stack.callback(checkpoints.close)
    stack.enter_context(memory.explain_out_of_memory())
    memory.check_state(trainer)
    start = _restore(trainer, checkpoints, stop, report)
    if start is None:
      _check_from_scratch(workdir, from_scratch)
    if jax.process_index() == 0:
      _record_extension(trainer, workdir, start.step if start else 0, origin, report)
    if start is None:
      state = _initial_state(trainer, workdir, stop, initial, initial_origin, report)
      start = _Start(state, 0, evaluated=True)
    loop = _Loop(trainer, workdir, task, evaluators, loggers, stop, checkpoints)
    return loop.run(update, start, profile)


@dataclasses.dataclass(frozen=True)
class _Start:
  """Where the loop starts; `evaluated` is False if an evaluation at this step was skipped."""

  state: State
  step: int
  evaluated: bool


def _restore(trainer, checkpoints, stop, report) -> _Start | None:
  """Return the state of the newest intact checkpoint; None if there is none."""
  shapes = trainer.state_shapes()
  restored = stop.before_start(lambda: checkpoints.restore(shapes, report))
  if restored is None:
    return None
  state, meta = restored
  report(f"resuming from step {meta['step']} of {trainer.cfg.steps}")
  return _Start(state, meta["step"], meta.get("evaluated", True))


def _check_from_scratch(workdir, from_scratch):
  """Raise ValueError if a run lost all its checkpoints and may not start from scratch."""
  if not all_damaged(workdir):
    return
  if not from_scratch:
    raise ValueError(
      f"every checkpoint in {workdir} was damaged and moved to {DAMAGED}/: put a repaired one"
      " back into checkpoints/, name another workdir, or restart with --from_scratch."
    )
  if jax.process_index() == 0:
    set_aside(workdir)


def _record_extension(trainer, workdir, step, origin, report):
  """Record in config.json that a run continues to more tokens, and report the learning rate."""
  cfg = trainer.cfg
  before = folders.extend(workdir, cfg, step, origin)
  if before is None:
    return
  if trainer.own_optimizer:
    report(f"extended from {before} to {cfg.tokens} tokens, with the optimizer's own schedule")
    return
  old = dataclasses.replace(cfg, tokens=before)
  old_rate, rate = (learning_rate(c, step) for c in (old, cfg))
  report(
    f"extended from {before} to {cfg.tokens} tokens: the learning rate follows the schedule of"
    f" {cfg.tokens} tokens, at this step {rate:.3g} instead of {old_rate:.3g}"
  )


def _initial_state(trainer, workdir, stop, initial, origin, report) -> State:
  """Return the state at step 0, with random weights or those of `initial`.

  Args:
    origin: of the run's initial weights, as in its config.json; None if they are random.
  """
  if origin is None:
    lowered = trainer.lower_init()
    return stop.before_start(lowered.compile)(np.uint32(trainer.cfg.seed))
  if initial is None:
    raise ValueError(
      f"{workdir} has no checkpoint yet, and was started with the weights of {origin['path']}: name"
      " them again with --init_from."
    )
  if initial.origin()["sha256"] != origin["sha256"]:
    raise ValueError(
      f"{initial.path} no longer holds the weights that {workdir} was started with: name another"
      " workdir."
    )
  report(f"starting from the {origin['kind']} weights of {origin['path']}")
  lowered = trainer.lower_init_from()
  weights = put_on_mesh(initial.take(), trainer.evaluation.weight_shapes)
  return stop.before_start(lowered.compile)(weights)


@dataclasses.dataclass(frozen=True)
class _Loop:
  """Updates, evaluations and checkpoints of one call of `train`."""

  trainer: Trainer
  workdir: pathlib.Path
  task: Task
  evaluators: Sequence[Evaluator]
  loggers: Sequence[Logger]
  stop: Stop
  checkpoints: Checkpoints

  def run(self, lowered_update, start: _Start, profile: bool) -> dict[str, float]:
    """Train from `start` to the end; return the last evaluation."""
    cfg, state = self.trainer.cfg, start.state
    shapes = self.trainer.batch_shapes()
    batches = self._batches(shapes, start.step)
    meta = dict(config=to_json(cfg), identity=self.task.identity())
    with contextlib.ExitStack() as stack:
      meter = Meter(self.trainer)
      update = self.stop.before_start(lowered_update.compile)
      memory.check_update(self.trainer, update)
      recorder = stack.enter_context(_Recorder(cfg, self.workdir, start.step, meter, self.loggers))
      trace = stack.enter_context(_Trace(self.workdir, start.step, profile))
      results = self._evaluate_resumed(start, recorder)
      if self._stops_early(results):
        return results
      for step in range(start.step + 1, cfg.steps + 1):
        trace.before(step)
        batch = self._checked(next(batches), step - 1, first=step - start.step <= _FULLY_CHECKED)
        batch = device_batches.to_devices(batch, shapes, cfg.data.scored)
        state, metrics = update(state, batch, learning_rate(cfg, step - 1))
        recorder.add(step, metrics)
        trace.after(step, state)
        last, stopping = step == cfg.steps, self.stop.asked(step)
        due = step % cfg.eval_every == 0
        # A preempted run saves first and evaluates when it resumes.
        evaluating = last or (due and not stopping)
        if evaluating:
          recorder.flush()
          results = self._evaluate(step, state)
          recorder.write(step, results)
          last = last or self._stops_early(results)
        if last or stopping or step % cfg.checkpoint.every == 0:
          recorder.flush()
          self.checkpoints.save(step, state, meta | dict(evaluated=evaluating or not due))
        recorder.exclude_pause(step)
        if last:
          break
        if stopping:
          self.checkpoints.wait()
          self.stop.leave(step)
      self.checkpoints.wait()
      return results if start.step < cfg.steps else self._evaluate(start.step, state)

  def _batches(self, shapes, start):
    host, hosts = device_batches.host_share(shapes["tokens"])
    workers = self.trainer.cfg.data.workers
    return training_batches(self.task, host=host, hosts=hosts, workers=workers, start=start)

  def _checked(self, batch, step, first):
    """Return the batch of a step; raise ValueError if the task made it wrongly."""
    device_batches.check_batch(
      batch,
      self.trainer.batch_shapes(),
      vocab=self.task.vocab,
      what=f"batch {step} of {type(self.task).__name__}",
      scored=first,
    )
    return batch

  def _evaluate(self, step, state) -> dict[str, float]:
    context = EvalContext(self.trainer.evaluation, state["weights"], step)
    return run_evaluators(context, self.evaluators)

  def _evaluate_resumed(self, start, recorder) -> dict[str, float]:
    """Repeat the evaluation of the step that a run resumes from, if it was skipped or decides."""
    cfg = self.trainer.cfg
    if not 0 < start.step < cfg.steps or start.step % cfg.eval_every:
      return {}
    if start.evaluated and cfg.stop_metric is None:
      return {}
    results = self._evaluate(start.step, start.state)
    if not start.evaluated:
      recorder.write(start.step, results)
    return results

  def _stops_early(self, results) -> bool:
    """Whether an evaluation has `stop_metric` above its threshold."""
    cfg = self.trainer.cfg
    if cfg.stop_metric is None or not results:
      return False
    if cfg.stop_metric not in results:
      raise ValueError(
        f"stop_metric is {cfg.stop_metric!r}, but the evaluators give {sorted(results)}."
      )
    return results[cfg.stop_metric] > cfg.stop_above


class _Recorder:
  """Loggers, progress bar and divergence check.

  The metrics of an update are read after the next one was dispatched, so that the devices do not
  wait for the host.
  """

  def __init__(
    self,
    cfg: TrainConfig,
    workdir: pathlib.Path,
    start: int,
    meter: Meter,
    loggers: Sequence[Logger],
  ):
    self._cfg, self._workdir, self._meter = cfg, workdir, meter
    self._pending = None
    self._paused = False
    quiet = jax.process_index() != 0
    self._own_loggers = [] if quiet else open_loggers(workdir, start)
    self._loggers = [] if quiet else [*self._own_loggers, *loggers]
    self._bar = tqdm(total=cfg.steps, initial=start, unit="update", disable=quiet, smoothing=0.1)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._bar.close()
    for logger in self._own_loggers:
      logger.close()

  def add(self, step: int, metrics: dict[str, jax.Array]):
    """Read the metrics of the previous update and hold these until the next call."""
    self._read()
    self._pending = step, metrics

  def flush(self):
    """Read the metrics of the last update, before an evaluation or a checkpoint."""
    self._read()
    for logger in self._own_loggers:
      logger.sync()
    self._paused = True

  def write(self, step: int, results: dict[str, float]):
    """Log the results of an evaluation."""
    if results:
      self._log(step, results)

  def exclude_pause(self, step: int):
    """Do not count the time since `flush` as training time."""
    if self._paused:
      self._meter.restart(step)
    self._paused = False

  def _log(self, step, metrics):
    for logger in self._loggers:
      logger.log(step, metrics)

  def _read(self):
    if self._pending is None:
      return
    (step, metrics), self._pending = self._pending, None
    cfg, metrics = self._cfg, {name: x.item() for name, x in metrics.items()}
    self._bar.update(1)
    if metrics["bad"] >= cfg.max_bad_updates:
      raise DivergenceError(
        f"{metrics['bad']} consecutive updates had non-finite gradients, the last at step {step}"
        f" (batch {step - 1} of seed {cfg.seed}): {_last_checkpoint(self._workdir)}; lower"
        " optimizer.learning_rate, or look at this batch."
      )
    if step % cfg.log_every == 0 or step == cfg.steps:
      self._log(step, metrics | self._meter.rates(step))
      self._bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)


def _last_checkpoint(workdir) -> str:
  if steps := saved_steps(workdir):
    return f"the last checkpoint, of step {steps[-1]}, is in {workdir}"
  return "no checkpoint was saved yet"


class _Trace:
  """Profiler trace of the updates `_TRACED`."""

  def __init__(self, workdir: pathlib.Path, start: int, profile: bool):
    self._folder, self._start, self._profile = str(workdir / "profile"), start, profile
    self._stack = contextlib.ExitStack()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._stack.close()

  def before(self, step: int):
    if self._profile and step - self._start == _TRACED.start:
      self._stack.enter_context(jax.profiler.trace(self._folder))

  def after(self, step: int, state: State):
    if self._profile and step - self._start == _TRACED.stop:
      jax.block_until_ready(state)
      self._stack.close()
