"""Train on meshes of 8 simulated devices and compare with one device; print JSON lines.

Run as a subprocess by test_mesh.py.
"""

import json
import pathlib
import sys

import jax
import numpy as np

from deltanet_jax import device_batches
from deltanet_jax.config import MeshConfig
from deltanet_jax.models import preset
from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.optim import learning_rate
from deltanet_jax.train.step import make_trainer
from tests.support.training import tiny

MESHES = {
  "data": dict(data=8),
  "fsdp": dict(data=1, fsdp=8),
  "tensor": dict(data=4, tensor=2),
  "sequence": dict(data=4, sequence=2),
  "mixed": dict(data=2, fsdp=2, tensor=2),
}


def config(name, **mesh):
  cfg = tiny(mesh=MeshConfig(**mesh))
  # Four heads. The mixed mesh has a hybrid model, gradient accumulation, and all model options of
  # the synthetic benchmarks.
  mixed = name == "mixed"
  model = preset("deltanet-sliding-tiny" if mixed else "deltanet-tiny", vocab=260)
  model.depth = 2 if mixed else 1
  model.mixers["deltanet"].key_size = model.mixers["deltanet"].value_size = 16
  cfg.model, cfg.grad_accum, cfg.data.batch = model, 2 if mixed else 1, 16
  if mixed:
    cfg.data.scored, model.positions, model.embedding_dropout = SCORED, 32, 0.1
    model.mlp, model.norm, model.head_bias = "gelu", "layer", True
  return cfg


def batch(scored=None):
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 257, (16, 33)).astype(np.int32)
  ids = np.cumsum(rng.random((16, 32)) < 0.1, axis=1).astype(np.int32) + 1
  mask = rng.random((16, 32)) < 0.9
  if scored is not None:
    mask &= np.cumsum(mask, axis=1) <= scored
  return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ids, mask=mask)


SCORED = 20


class Machine:
  """A mesh of devices and the train step compiled for it."""

  def __init__(self, name, devices, **mesh):
    self.trainer = make_trainer(config(name, **mesh), devices)
    self._update = self.trainer.lower_update().compile()

  def run(self, state, updates):
    """Return the state after some updates, and the metrics of each."""
    history = []
    for _ in range(updates):
      cfg, shapes = self.trainer.cfg, self.trainer.batch_shapes()
      rate = learning_rate(cfg, state["step"].item())
      state, metrics = self._update(
        state, device_batches.to_devices(batch(cfg.data.scored), shapes), rate
      )
      history.append({name: x.item() for name, x in metrics.items()})
    return state, history

  def put(self, state):
    """Return the state sharded over the mesh."""
    shardings = jax.tree.map(lambda x: x.sharding, self.trainer.state_shapes())
    return jax.device_put(state, shardings)


def difference(state, expected, start):
  """Relative error of the weight updates and of the optimizer moments."""
  flat = lambda tree: np.concatenate(
    [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
  )
  norm = np.linalg.norm
  change = flat(expected["weights"]) - flat(start["weights"])
  moments = flat(expected["optimizer"])
  return max(
    norm(flat(state["weights"]) - flat(expected["weights"])) / norm(change),
    norm(flat(state["optimizer"]) - moments) / norm(moments),
  )


def report(name, state, metrics, expected, expected_metrics, start):
  """Print the relative errors of a run against the one on one device."""
  losses = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(metrics, expected_metrics)]
  print(json.dumps(dict(name=name, loss=max(losses), update=difference(state, expected, start))))


def main(folder):
  devices = jax.devices()
  assert len(devices) == 8
  one, eight, expected = {}, {}, {}
  for kind in ("plain", "mixed"):
    one[kind] = Machine(kind, devices[:1])
    start = jax.device_get(one[kind].trainer.lower_init().compile()(np.uint32(0)))
    state, metrics = one[kind].run(one[kind].put(start), 2)
    expected[kind] = (jax.device_get(state), metrics, start)
  for name, mesh in MESHES.items():
    kind = "mixed" if name == "mixed" else "plain"
    machine = eight[name] = Machine(name, devices, **mesh)
    state, metrics = machine.run(machine.put(expected[kind][2]), 2)
    report(name, state, metrics, *expected[kind])
    if name == "fsdp":
      weights = jax.tree.leaves(state["weights"])
      per_device = sum(x.addressable_shards[0].data.nbytes for x in weights)
      print(json.dumps(dict(name="share", share=8 * per_device / sum(x.nbytes for x in weights))))
  # One update with FSDP on eight devices, saved; the second on one device and on another mesh.
  fsdp = eight["fsdp"]
  state, metrics = fsdp.run(fsdp.put(expected["plain"][2]), 1)
  checkpoints = Checkpoints(pathlib.Path(folder), fsdp.trainer.cfg.checkpoint)
  checkpoints.save(1, state, {})
  checkpoints.wait()
  for count, machine in ((1, one["plain"]), (8, eight["tensor"])):
    state, meta = checkpoints.restore(machine.trainer.state_shapes())
    assert meta["step"] == 1
    state, more = machine.run(state, 1)
    report(f"restored on {count}", state, metrics + more, *expected["plain"])


if __name__ == "__main__":
  main(sys.argv[1])
