"""The training loop: from a configuration and a folder to a trained model in it."""

import contextlib
import itertools
import math
import pathlib
import signal
import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils
from tqdm import tqdm

from deltanet_jax.config import TrainConfig, to_json
from deltanet_jax.data import Corpus, evaluation_batches, training_batches
from deltanet_jax.models import summarize
from deltanet_jax.train import feed
from deltanet_jax.train import workdir as folders
from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.metrics import Log, peak_flops
from deltanet_jax.train.step import Trainer, make_trainer

# Updates of a trace: after the first ones, which are slower.
_TRACED = range(3, 8)


class PreemptionError(Exception):
  """Asked to stop (SIGTERM); everything was saved."""


class DivergenceError(Exception):
  """Too many updates in a row had gradients that were not finite."""


class _Stop:
  """Whether SIGTERM has come, to any of the processes."""

  def __enter__(self):
    self._asked = False
    # Of several processes the coordination service hears it, and tells all the same step.
    self._alone = jax.process_count() == 1
    if self._alone:
      self._before = signal.signal(signal.SIGTERM, self._ask)
    return self

  def _ask(self, *_):
    self._asked = True

  def asked(self, step: int) -> bool:
    return self._asked if self._alone else multihost_utils.reached_preemption_sync_point(step)

  def __exit__(self, *_):
    if self._alone:
      signal.signal(signal.SIGTERM, self._before)


def train(
  cfg: TrainConfig,
  workdir: str | pathlib.Path,
  open_corpus: Callable[[], Corpus],
  *,
  origin: dict | None = None,
  profile: bool = False,
  say=print,
) -> dict[str, float]:
  """Trains until `cfg.tokens`, going on from the newest checkpoint; returns the last evaluation.

  Everything that can be wrong with the configuration, the mesh, the folder and the corpus is
  found before anything is compiled or written.

  Args:
    open_corpus: called once the configuration has been found right; it may write.
    origin: provenance, kept in config.json.
    profile: writes a trace of a few updates to workdir/profile.
    say: takes one line for people.
  """
  workdir = pathlib.Path(workdir)
  trainer = make_trainer(cfg)
  folders.check(workdir, cfg)
  update = trainer.lower_update()
  corpus = open_corpus()
  recipe = corpus.manifest.recipe
  if recipe.vocab > cfg.model.vocab:
    raise ValueError(
      f"model.vocab is {cfg.model.vocab}, less than the {recipe.vocab} tokens of the corpus."
    )
  identity = dict(tokenizer=recipe.tokenizer_hash, corpus=folders.corpus_hash(corpus))
  folders.check_identity(workdir, identity)
  batches = _training(trainer, corpus)
  if jax.process_index() == 0:
    folders.write(workdir, cfg, identity, origin or {})

  checkpoints = Checkpoints(workdir, cfg.checkpoint)
  restored = checkpoints.restore(trainer.state_shapes(), say)
  if restored is None:
    state = trainer.lower_init().compile()()
    start = 0
  else:
    state, meta = restored
    start = meta["step"]
    batches.set_state(meta["data"])
    say(f"going on from step {start} of {cfg.steps}")
  meta = lambda: dict(config=to_json(cfg), **identity, data=batches.get_state())

  evaluate = Evaluation(trainer, corpus)
  log = Log(workdir, start)
  meter = _Meter(trainer)
  update = update.compile()
  results = {}
  bar = tqdm(
    total=cfg.steps, initial=start, unit="update", disable=jax.process_index() != 0, smoothing=0.1
  )
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(_Stop())
    for closing in (bar, log, checkpoints):
      stack.callback(closing.close)
    tracing = contextlib.ExitStack()
    stack.callback(tracing.close)
    pending = None
    for step in range(start + 1, cfg.steps + 1):
      if profile and step - start == _TRACED.start:
        tracing.enter_context(jax.profiler.trace(str(workdir / "profile")))
      state, metrics = update(state, feed.place(next(batches), trainer.batch_shapes()))
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
      if evaluating:
        results = evaluate(state["weights"])
        log.write(step, results)
      if saving:
        checkpoints.save(step, state, meta())
      if evaluating or saving:
        meter.restart(step)
      if stopping and not last:
        checkpoints.wait()
        raise PreemptionError(f"stopped by SIGTERM after step {step}, saved in {workdir}.")
    checkpoints.wait()
    if start >= cfg.steps:
      results = evaluate(state["weights"])
  return results


def _training(trainer: Trainer, corpus: Corpus):
  data = trainer.cfg.data
  host, hosts = feed.host_share(trainer.batch_shapes()["tokens"])
  return training_batches(
    corpus.train,
    length=data.length,
    batch=data.batch,
    seed=trainer.cfg.seed,
    host=host,
    hosts=hosts,
    workers=data.workers,
  )


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
      f" in {workdir}; lower optimizer.peak, or look at this batch."
    )
  if step % cfg.log_every == 0 or step == cfg.steps:
    log.write(step, metrics | meter.rates(step))
    bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)


class _Meter:
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


class Evaluation:
  """Loss per token on the validation split, and bits per byte of its text if all of it is read."""

  def __init__(self, trainer: Trainer, corpus: Corpus):
    self._trainer, self._split = trainer, corpus.validation
    self._program = None

  def __call__(self, weights) -> dict[str, float]:
    trainer, data = self._trainer, self._trainer.cfg.data
    if self._split.tokens < 2:
      return {}
    self._program = self._program or trainer.lower_evaluate().compile()
    shapes = trainer.batch_shapes()
    host, hosts = feed.host_share(shapes["tokens"])
    batches = evaluation_batches(
      self._split, length=data.length, batch=data.batch, host=host, hosts=hosts
    )
    total, count = 0.0, 0
    for batch in itertools.islice(batches, trainer.cfg.eval_batches):
      loss, targets = self._program(weights, feed.place(batch, shapes))
      total, count = total + loss.item(), count + targets.item()
    results = dict(validation_loss=total / count)
    if trainer.cfg.eval_batches is None:
      results["validation_bits_per_byte"] = total / math.log(2) / self._split.bytes
    return results
