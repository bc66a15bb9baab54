"""The training loop: from a configuration, a task and a folder to a trained model in it."""

import contextlib
import pathlib
from collections.abc import Sequence

import jax
from tqdm import tqdm

from deltanet_jax.config import TrainConfig, to_json
from deltanet_jax.data import Task, training_batches
from deltanet_jax.files import writing
from deltanet_jax.train import feed
from deltanet_jax.train import workdir as folders
from deltanet_jax.train.checkpoint import DAMAGED, Checkpoints, all_damaged
from deltanet_jax.train.evaluated import Evaluated, Evaluator, Scorer
from deltanet_jax.train.lock import locked
from deltanet_jax.train.metrics import Log, Meter, set_aside
from deltanet_jax.train.step import State, make_trainer
from deltanet_jax.train.stopping import Stop

# Updates of a trace: after the first ones, which are slower.
_TRACED = range(3, 8)


class DivergenceError(Exception):
  """Too many updates in a row had gradients that were not finite."""


def check_start(cfg: TrainConfig, workdir: str | pathlib.Path):
  """Raises ValueError if this run cannot start, or go on, in this folder; writes nothing."""
  make_trainer(cfg)
  folders.check(pathlib.Path(workdir), cfg)


def train(
  cfg: TrainConfig,
  workdir: str | pathlib.Path,
  task: Task,
  *,
  evaluators: Sequence[Evaluator] = (),
  origin: dict | None = None,
  from_scratch: bool = False,
  profile: bool = False,
  say=print,
) -> dict[str, float]:
  """Trains until `cfg.tokens`, going on from the newest checkpoint; returns the last evaluation.

  Everything that can be wrong with the configuration, the mesh, the folder and the task is found
  before anything is compiled or written. Told to stop by SIGTERM it saves and raises
  PreemptionError; by Ctrl-C, KeyboardInterrupt.

  Args:
    evaluators: asked every `cfg.eval_every` updates and at the end.
    origin: provenance, kept in config.json.
    from_scratch: starts at 0 where every checkpoint was damaged, which is an error else.
    profile: writes a trace of a few updates to workdir/profile.
    say: takes one line for people.
  """
  workdir = pathlib.Path(workdir)
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(Stop(workdir))
    stack.enter_context(writing(workdir))
    trainer = make_trainer(cfg)
    folders.check(workdir, cfg)
    folders.check_task(workdir, cfg, task)
    update = trainer.lower_update()
    if jax.process_index() == 0:
      workdir.mkdir(parents=True, exist_ok=True)
      stack.enter_context(locked(workdir, say))
      folders.check(workdir, cfg)  # again: another run may have begun and ended here meanwhile
      folders.write(workdir, cfg, task, origin or {})
    if line := task.remark(cfg.model.vocab):
      say(line)
    return _train(trainer, update, workdir, task, evaluators, stop, from_scratch, profile, say)


def _begin(trainer, checkpoints, workdir, stop, from_scratch, say) -> tuple[State, int]:
  """The state to start from, and its step."""
  restored = stop.before_start(lambda: checkpoints.restore(trainer.state_shapes(), say))
  if restored is not None:
    state, step = restored[0], restored[1]["step"]
    say(f"going on from step {step} of {trainer.cfg.steps}")
    return state, step
  if all_damaged(workdir):
    if not from_scratch:
      raise ValueError(
        f"every checkpoint in {workdir} was damaged and moved to {DAMAGED}/: put a repaired one"
        " back into checkpoints/, name another workdir, or start again at 0 (from_scratch)."
      )
    if jax.process_index() == 0:
      set_aside(workdir)
  init = trainer.lower_init()
  return stop.before_start(init.compile)(), 0


def _train(trainer, update, workdir, task, evaluators, stop, from_scratch, profile, say):
  cfg = trainer.cfg
  with contextlib.ExitStack() as stack:
    checkpoints = Checkpoints(workdir, cfg.checkpoint)
    stack.callback(checkpoints.close)
    state, start = _begin(trainer, checkpoints, workdir, stop, from_scratch, say)
    meta = dict(config=to_json(cfg), identity=task.identity())
    shapes = trainer.batch_shapes()
    host, hosts = feed.host_share(shapes["tokens"])
    workers = cfg.data.workers
    batches = training_batches(task, host=host, hosts=hosts, workers=workers, start=start)
    scorer = Scorer(trainer)

    def evaluate(step) -> dict[str, float]:
      evaluated = Evaluated(scorer, state["weights"], step)
      return {name: number for evaluator in evaluators for name, number in evaluator(evaluated)}

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
    for step in range(start + 1, cfg.steps + 1):
      if profile and step - start == _TRACED.start:
        tracing.enter_context(jax.profiler.trace(str(workdir / "profile")))
      state, metrics = update(state, feed.place(next(batches), shapes))
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
      if saving:
        checkpoints.save(step, state, meta)
      if evaluating or saving:
        meter.restart(step)
      if stopping and not last:
        checkpoints.wait()
        stop.leave(step)
    checkpoints.wait()
    if start >= cfg.steps:
      results = evaluate(start)
  return results


def _read(pending, log, bar, meter, cfg, workdir):
  """Waits for the numbers of an update that was dispatched before; writes and judges them."""
  if pending is None:
    return
  step, metrics = pending
  metrics = {name: x.item() for name, x in metrics.items()}
  bar.update(1)
  if metrics["bad"] >= cfg.max_bad_updates:
    raise DivergenceError(
      f"the gradients of {metrics['bad']} updates in a row were not finite, the last at step {step}"
      f" (batch {step - 1} of seed {cfg.seed}): weights are as before them, the last checkpoint is"
      f" in {workdir}; lower optimizer.learning_rate, or look at this batch."
    )
  if step % cfg.log_every == 0 or step == cfg.steps:
    log.write(step, metrics | meter.rates(step))
    bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)
