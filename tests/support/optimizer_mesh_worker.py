"""Two updates of each optimizer with fsdp on 8 simulated devices and on one; print JSON lines.

Run as a subprocess by test_optimizers.py.
"""

import json

import jax
import numpy as np
import optax

from deltanet_jax import device_batches
from deltanet_jax.config import MeshConfig
from deltanet_jax.train.optim import learning_rate
from deltanet_jax.train.step import make_trainer
from tests.support.mesh_worker import batch, config

OPTIMIZERS = ("adamw", "muon", "lion", "adafactor", "own")


def run(name, devices, mesh):
  cfg = config("plain")
  cfg.mesh, cfg.optimizer.warmup_tokens = mesh, 0
  own = optax.chain(optax.clip(1.0), optax.adamw(1e-3)) if name == "own" else None
  cfg.optimizer.name = "adamw" if own else name
  trainer = make_trainer(cfg, devices, optimizer=own)
  state = trainer.lower_init().compile()(np.uint32(0))
  update = trainer.lower_update().compile()
  for step in range(2):
    arrays = device_batches.to_devices(batch(), trainer.batch_shapes())
    state, _ = update(state, arrays, learning_rate(cfg, step))
  return state


def main():
  devices = jax.devices()
  assert len(devices) == 8
  for name in OPTIMIZERS:
    one = run(name, devices[:1], MeshConfig())
    eight = run(name, devices, MeshConfig(data=1, fsdp=8))
    flat = lambda x: np.concatenate([np.ravel(w) for w in jax.tree.leaves(jax.device_get(x))])
    expected, found = flat(one["weights"]), flat(eight["weights"])
    leaves = jax.tree.leaves(eight["optimizer"])
    per_device = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    share = 8 * per_device / sum(x.nbytes for x in leaves)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    print(json.dumps(dict(name=name, error=float(error), share=share)))


if __name__ == "__main__":
  main()
