"""Throughput and model FLOPs utilization (MFU) of a run."""

import time

import jax
import jax.numpy as jnp

from deltanet_jax import chips
from deltanet_jax.models import summarize
from deltanet_jax.train.step import Trainer


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
