"""The training loop: from a configuration, a task and a folder to a trained model in it."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from tqdm import tqdm

from deltanet_jax import device_batches
from deltanet_jax.config import TrainConfig, to_json
from deltanet_jax.data import Task, training_batches
from deltanet_jax.eval.evaluation import EvalContext, Evaluator, run_evaluators
from deltanet_jax.files import locked, writing
from deltanet_jax.models.abstract import put_on_mesh
from deltanet_jax.train import workdir as folders
from deltanet_jax.train.checkpoint import DAMAGED, Checkpoints, all_damaged
from deltanet_jax.train.checkpoint_reader import saved_steps
from deltanet_jax.train.init_from import InitFrom
from deltanet_jax.train.metrics import Log, Meter, set_aside
from deltanet_jax.train.optim import learning_rate
from deltanet_jax.train.preemption import Stop
from deltanet_jax.train.step import State, make_trainer

# Updates of a trace: after the first ones, which are slower.
_TRACED = range(3, 8)


class DivergenceError(Exception):
  """Too many updates in a row had gradients that were not finite."""


def check_start(
  cfg: TrainConfig,
  workdir: str | pathlib.Path,
  *,
  initial: InitFrom | None = None,
  extend: bool = False,
):
  """Raises ValueError if this run cannot start, or go on, in this folder; writes nothing."""
  make_trainer(cfg)
  workdir = pathlib.Path(workdir)
  folders.check(workdir, cfg, initial=initial and initial.path, extend=extend)
  if initial is not None and not saved_steps(workdir):
    initial.check(cfg.model)


def train(
  cfg: TrainConfig,
  workdir: str | pathlib.Path,
  task: Task,
  *,
  evaluators: Sequence[Evaluator] = (),
  origin: dict | None = None,
  initial: InitFrom | None = None,
  extend: bool = False,
  from_scratch: bool = False,
  profile: bool = False,
  report=print,
) -> dict[str, float]:
  """Trains until `cfg.tokens`, going on from the newest checkpoint; returns the last evaluation.

  Ends earlier where an evaluation has `cfg.stop_metric` above `cfg.stop_above`.

  Everything that can be wrong with the configuration, the mesh, the folder and the task is found
  before anything is compiled or written. Told to stop by SIGTERM it saves and raises
  PreemptionError; by Ctrl-C, KeyboardInterrupt.

  Args:
    evaluators: asked every `cfg.eval_every` updates and at the end.
    origin: provenance, kept in config.json.
    initial: weights that a new run begins with, at step 0 with a new optimiser; one that has saved
      goes on from its own and does not read them.
    extend: lets a run, finished or not, go on to a larger `cfg.tokens` than it was started for.
      Data go on as if it had been started so, and the learning rate is from here on that of the
      larger number: a cosine that had come down goes up again to where it would be.
    from_scratch: starts at 0 where every checkpoint was damaged, which is an error else.
    profile: writes a trace of a few updates to workdir/profile.
    report: called with one line of text.
  """
  workdir = pathlib.Path(workdir)
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(Stop(workdir))
    stack.enter_context(writing(workdir))
    trainer = make_trainer(cfg)
    check_start(cfg, workdir, initial=initial, extend=extend)
    folders.check_task(workdir, cfg, task)
    update = trainer.lower_update()
    new = not (workdir / folders.FILE).exists()
    begun = (initial and initial.origin()) if new else folders.begun_with(workdir)
    if jax.process_index() == 0:
      workdir.mkdir(parents=True, exist_ok=True)
      stack.enter_context(locked(workdir / folders.LOCK, report=report))
      # Again: another run may have begun and ended here meanwhile.
      check_start(cfg, workdir, initial=initial, extend=extend)
      folders.write(workdir, cfg, task, origin or {}, begun)
    if line := task.remark(cfg.model.vocab):
      report(line)
    begin = functools.partial(
      _begin, trainer, workdir, stop, initial, begun, from_scratch, origin or {}, report
    )
    return _train(trainer, update, workdir, task, evaluators, stop, begin, profile)


def _begin(
  trainer, workdir, stop, initial, begun, from_scratch, origin, report, checkpoints
) -> tuple[State, int, bool]:
  """The state to start from, its step, and whether it was evaluated if it was to be."""
  restored = stop.before_start(lambda: checkpoints.restore(trainer.state_shapes(), report))
  if restored is not None:
    state, step = restored[0], restored[1]["step"]
    report(f"going on from step {step} of {trainer.cfg.steps}")
    _extend(trainer.cfg, workdir, step, origin, report)
    return state, step, restored[1].get("evaluated", True)
  if all_damaged(workdir):
    if not from_scratch:
      raise ValueError(
        f"every checkpoint in {workdir} was damaged and moved to {DAMAGED}/: put a repaired one"
        " back into checkpoints/, name another workdir, or restart with --from_scratch."
      )
    if jax.process_index() == 0:
      set_aside(workdir)
  _extend(trainer.cfg, workdir, 0, origin, report)
  if begun is None:
    init = trainer.lower_init()
    return stop.before_start(init.compile)(np.uint32(trainer.cfg.seed)), 0, True
  if initial is None:
    raise ValueError(
      f"{workdir} has no checkpoint yet, and begins with the weights of {begun['path']}: name them"
      " again with --init_from."
    )
  if initial.origin()["sha256"] != begun["sha256"]:
    raise ValueError(
      f"{initial.path} no longer holds the weights that {workdir} was started with: name another"
      " workdir."
    )
  report(f"starting from the {begun['kind']} weights of {begun['path']}")
  begin = trainer.lower_init_from()
  weights = put_on_mesh(initial.take(), trainer.state_shapes()["weights"])
  return stop.before_start(begin.compile)(weights), 0, True


def _extend(cfg, workdir, step, origin, report):
  """Notes in config.json that a run goes on to more tokens, and tells what that does."""
  if jax.process_index() != 0:
    return
  before = folders.extend(workdir, cfg, step, origin)
  if before is not None:
    old = dataclasses.replace(cfg, tokens=before)
    rates = [learning_rate(c, step) for c in (old, cfg)]
    report(
      f"extended from {before} to {cfg.tokens} tokens: the learning rate is that of a run of so"
      f" many, at this step {rates[1]:.3g} instead of {rates[0]:.3g}"
    )


def _train(trainer, update, workdir, task, evaluators, stop, begin, profile):
  cfg = trainer.cfg
  with contextlib.ExitStack() as stack:
    checkpoints = Checkpoints(workdir, cfg.checkpoint)
    stack.callback(checkpoints.close)
    state, start, evaluated_before = begin(checkpoints)
    meta = dict(config=to_json(cfg), identity=task.identity())
    shapes = trainer.batch_shapes()
    host, hosts = device_batches.host_share(shapes["tokens"])
    workers = cfg.data.workers
    batches = training_batches(task, host=host, hosts=hosts, workers=workers, start=start)

    def evaluate(step) -> dict[str, float]:
      return run_evaluators(EvalContext(trainer.evaluation, state["weights"], step), evaluators)

    meter = Meter(trainer)
    update = stop.before_start(update.compile)
    log = Log(workdir, start)
    stack.callback(log.close)
    bar = tqdm(
      total=cfg.steps, initial=start, unit="update", disable=jax.process_index() != 0, smoothing=0.1
    )
    stack.callback(bar.close)
    tracing = contextlib.ExitStack()
    stack.callback(tracing.close)
    results, pending = {}, None
    if 0 < start < cfg.steps and start % cfg.eval_every == 0:
      # Told to stop it was not evaluated; or perhaps this was its end.
      results = {} if evaluated_before and cfg.stop_metric is None else evaluate(start)
      if results and not evaluated_before:
        log.write(start, results)
      if results and _is_enough(cfg, results):
        return results
    for step in range(start + 1, cfg.steps + 1):
      if profile and step - start == _TRACED.start:
        tracing.enter_context(jax.profiler.trace(str(workdir / "profile")))
      batch = device_batches.to_devices(next(batches), shapes, cfg.data.scored)
      state, metrics = update(state, batch, learning_rate(cfg, step - 1))
      _read(pending, log, bar, meter, cfg, workdir)
      pending = (step, metrics)
      if profile and step - start == _TRACED.stop:
        jax.block_until_ready(state)
        tracing.close()
      last, stopping = step == cfg.steps, stop.asked(step)
      evaluating = last or (step % cfg.eval_every == 0 and not stopping)
      saving = last or stopping or step % cfg.checkpoint.every == 0
      if evaluating or saving:
        _read(pending, log, bar, meter, cfg, workdir)
        pending = None
      if evaluating and (results := evaluate(step)):
        log.write(step, results)
        if _is_enough(cfg, results):
          last = saving = True
      if saving:
        owed = step % cfg.eval_every == 0 and not evaluating
        checkpoints.save(step, state, meta | dict(evaluated=not owed))
      if evaluating or saving:
        meter.restart(step)
      if stopping and not last:
        checkpoints.wait()
        stop.leave(step)
      if last:
        break
    checkpoints.wait()
    if start >= cfg.steps:
      results = evaluate(start)
  return results


def _is_enough(cfg, results) -> bool:
  """Whether an evaluation ends the run."""
  if cfg.stop_metric is None:
    return False
  if cfg.stop_metric not in results:
    raise ValueError(
      f"stop_metric is {cfg.stop_metric!r}, but the evaluators give {sorted(results)}."
    )
  return results[cfg.stop_metric] > cfg.stop_above


def _last_checkpoint(workdir) -> str:
  if steps := saved_steps(workdir):
    return f"the last checkpoint, of step {steps[-1]}, is in {workdir}"
  return "no checkpoint was saved yet"


def _read(pending, log, bar, meter, cfg, workdir):
  """Waits for the numbers of an update that was dispatched before; writes and judges them."""
  if pending is None:
    return
  step, metrics = pending
  metrics = {name: x.item() for name, x in metrics.items()}
  bar.update(1)
  if metrics["bad"] >= cfg.max_bad_updates:
    raise DivergenceError(
      f"{metrics['bad']} consecutive updates had non-finite gradients, the last at step {step}"
      f" (batch {step - 1} of seed {cfg.seed}): {_last_checkpoint(workdir)}; lower"
      " optimizer.learning_rate, or look at this batch."
    )
  if step % cfg.log_every == 0 or step == cfg.steps:
    log.write(step, metrics | meter.rates(step))
    bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)
