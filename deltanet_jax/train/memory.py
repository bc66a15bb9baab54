"""Compare the memory of a training step with that of the devices, and say which settings fit."""

import contextlib
import dataclasses
import math

import jax

from deltanet_jax import host_memory, sharding
from deltanet_jax.config import Remat
from deltanet_jax.train.step import Trainer, make_trainer

_MARGIN = 0.95  # of the free memory, for suggestions


def check_state(trainer: Trainer):
  """Raise ValueError if weights and optimizer state do not fit into the free memory."""
  device = _device(trainer)
  free, needed = _free_bytes(device), _per_device(trainer.state_shapes()) * _sharing(device)
  if free is not None and needed > free:
    raise ValueError(
      f"weights and optimizer state take {_gib(needed)}, {device} has {_gib(free)} free: shard them"
      " over more devices with mesh.fsdp, or take a smaller model."
    )


def check_update(trainer: Trainer, compiled: jax.stages.Compiled):
  """Raise ValueError if a compiled update does not fit into the free memory.

  Call it when the state is allocated. The message names settings that fit. It takes one more
  compilation to find them if `model.remat` is not "full".
  """
  device = _device(trainer)
  free, extra = _free_bytes(device), _extra_bytes(compiled, device)
  if free is None or extra is None or extra <= free:
    return
  fits = _suggestions(trainer, extra, free)
  cfg, full = trainer.cfg, "full"
  if cfg.model.remat != full:
    other = _with_remat(trainer, full)
    less = _extra_bytes(other.lower_update().compile(), device)
    if less <= _MARGIN * free:
      fits.append(f"model.remat=full ({_gib(less)})")
    else:
      fits += [f"model.remat=full with {one}" for one in _suggestions(other, less, free)]
  state = _per_device(trainer.state_shapes()) * _sharing(device)
  raise ValueError(
    f"one update needs {_gib(extra)} for gradients and activations besides {_gib(state)} of weights"
    f" and optimizer state, {device} has {_gib(free)} free: "
    + (
      f"set {' or '.join(fits)}."
      if fits
      else "one sequence at a time does not fit either: lower data.length, shard over more devices"
      " with mesh.fsdp, or take a smaller model."
    )
  )


@contextlib.contextmanager
def explain_out_of_memory():
  """Raise ValueError with one sentence where JAX reports that a device ran out of memory."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if "RESOURCE_EXHAUSTED" not in str(e):
      raise
    reason = str(e).strip().splitlines()[0][:200]
    raise ValueError(
      f"a device ran out of memory ({reason}): raise grad_accum, set model.remat=full, lower"
      " data.batch, or shard over more devices with mesh.fsdp."
    ) from e


def _suggestions(trainer: Trainer, extra: int, free: int) -> list[str]:
  """Return settings with which an update fits, with the memory it is estimated to need.

  Memory is linear in the sequences of a micro-batch (checked with deltanet-340m: 64, 16 and 1
  sequences need 42.7, 12.8 and 3.5 GiB); the constant is the gradient, twice if it is accumulated.
  """
  cfg, device = trainer.cfg, _device(trainer)
  gradient = _per_device(trainer.evaluation.weight_shapes) * _sharing(device)
  constant = lambda accum: gradient * min(accum, 2)
  per_sequence = max(extra - constant(cfg.grad_accum), 0) / (cfg.data.batch / cfg.grad_accum)
  needed = lambda batch, accum: constant(accum) + per_sequence * batch / accum
  fits = lambda batch, accum: needed(batch, accum) <= _MARGIN * free
  shards = math.prod(trainer.mesh.shape[a] for a in sharding.mesh_axes("batch", trainer.mesh))
  batch, accum = cfg.data.batch, cfg.grad_accum
  found = []
  for n in range(accum + 1, batch // shards + 1):
    if batch % (n * shards) == 0 and fits(batch, n):
      found.append(f"grad_accum={n} ({_gib(needed(batch, n))})")
      break
  smaller = [b for b in range(accum * shards, batch, accum * shards) if fits(b, accum)]
  if smaller:
    # A power of two times the smallest batch size, for round numbers.
    least = smaller[0]
    b = least << ((smaller[-1] // least).bit_length() - 1)
    found.append(f"data.batch={b} ({_gib(needed(b, accum))})")
  return found


def _with_remat(trainer: Trainer, remat: Remat) -> Trainer:
  cfg = dataclasses.replace(trainer.cfg, model=dataclasses.replace(trainer.cfg.model, remat=remat))
  own = trainer.optimizer if trainer.own_optimizer else None
  return make_trainer(cfg, trainer.mesh.devices.flatten().tolist(), optimizer=own)


def _device(trainer: Trainer) -> jax.Device:
  return trainer.mesh.local_devices[0]


def _sharing(device: jax.Device) -> int:
  """Return how many devices share the memory: simulated CPU devices share that of the host."""
  return len(jax.local_devices()) if device.platform == "cpu" else 1


def _free_bytes(device: jax.Device) -> int | None:
  """Return the free memory of a device in bytes; None if unknown."""
  if device.platform == "cpu":
    return host_memory.available_memory()
  stats = device.memory_stats() or {}
  if "bytes_limit" not in stats:
    return None
  return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _extra_bytes(compiled: jax.stages.Compiled, device: jax.Device) -> int | None:
  """Return the memory that an update needs besides its arguments; None if unknown."""
  found = compiled.memory_analysis()
  if found is None:
    return None
  new = found.output_size_in_bytes - found.alias_size_in_bytes
  return (found.temp_size_in_bytes + new) * _sharing(device)


def _per_device(shapes) -> int:
  """Return the bytes that one device holds of arrays with shardings."""
  size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
  return sum(map(size, jax.tree.leaves(shapes)))


def _gib(count: float) -> str:
  return f"{count / 2**30:.1f} GiB"
