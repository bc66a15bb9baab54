"""Run by test_mesh.py in a process with eight simulated devices; prints one JSON line per check."""

import json
import pathlib
import sys

import jax
import numpy as np

from deltanet_jax.config import MeshConfig
from deltanet_jax.models import preset
from deltanet_jax.train import feed
from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.step import make_trainer
from tests.train.conftest import tiny

MESHES = {
  "data": dict(data=8),
  "fsdp": dict(data=1, fsdp=8),
  "tensor": dict(data=4, tensor=2),
  "sequence": dict(data=4, sequence=2),
  "mixed": dict(data=2, fsdp=2, tensor=2),
}


def config(**mesh):
  # Four heads, two mixers, and rows in two parts.
  model = preset("deltanet-sliding-tiny", vocab=260, depth=2, width=64, mlp_multiple=64)
  model.mixers["deltanet"].key_size = model.mixers["deltanet"].value_size = 16
  return tiny(model=model, grad_accum=2, mesh=MeshConfig(**mesh), data=tiny().data)


def batch():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 257, (16, 33)).astype(np.int32)
  ids = np.cumsum(rng.random((16, 32)) < 0.1, axis=1).astype(np.int32) + 1
  mask = rng.random((16, 32)) < 0.9
  return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ids, mask=mask)


def trainer_for(devices, **mesh):
  cfg = config(**mesh)
  cfg.data.batch = 16
  return make_trainer(cfg, devices)


def run(trainer, state=None, updates=2):
  """The state after some updates, and the metrics of each."""
  state = trainer.lower_init().compile()() if state is None else state
  update, rows = trainer.lower_update().compile(), []
  for _ in range(updates):
    state, metrics = update(state, feed.place(batch(), trainer.batch_shapes()))
    rows.append({name: x.item() for name, x in metrics.items()})
  return state, rows


def difference(state, expected, start):
  """Relative error of the weights' change and of the moments."""
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


def report(name, state, rows, expected, expected_rows, start):
  losses = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(rows, expected_rows)]
  print(json.dumps(dict(name=name, loss=max(losses), update=difference(state, expected, start))))


def main(folder):
  devices = jax.devices()
  assert len(devices) == 8
  alone = trainer_for(devices[:1])
  start = jax.device_get(alone.lower_init().compile()())
  expected, expected_rows = run(alone)
  expected = jax.device_get(expected)
  for name, mesh in MESHES.items():
    trainer = trainer_for(devices, **mesh)
    state, rows = run(trainer)
    report(name, state, rows, expected, expected_rows, start)
    if name == "fsdp":
      sizes = {x.addressable_shards[0].data.nbytes / x.nbytes for x in jax.tree.leaves(state)}
      weights = jax.tree.leaves(state["weights"])
      per_device = sum(x.addressable_shards[0].data.nbytes for x in weights)
      print(json.dumps(dict(name="share", share=8 * per_device / sum(x.nbytes for x in weights))))
      assert min(sizes) == 1 / 8
  # One update on four devices, saved; the second on one, on four and on eight.
  four = trainer_for(devices[:4], data=1, fsdp=4)
  state, rows = run(four, updates=1)
  checkpoints = Checkpoints(pathlib.Path(folder), four.cfg.checkpoint)
  checkpoints.save(1, state, {})
  checkpoints.wait()
  for count, mesh in ((1, {}), (4, dict(data=1, fsdp=4)), (8, dict(data=2, tensor=4))):
    trainer = trainer_for(devices[:count], **mesh)
    state, meta = checkpoints.restore(trainer.state_shapes())
    assert meta["step"] == 1
    state, more = run(trainer, state, updates=1)
    report(f"restored on {count}", state, rows + more, expected, expected_rows, start)


if __name__ == "__main__":
  main(sys.argv[1])
