"""AOT compilation of a training step for machines that are not attached."""

import dataclasses

import pytest

from deltanet_jax.config import DataConfig, MeshConfig, TrainConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.models import preset
from experiments.aot import targets, train_step, train_step_report


def test_record_key_resolves_the_mesh():
  key = train_step_report.key_of("tiny", _config(-1), targets.machine("v5e:4x4"))
  assert key["mesh"] == "fsdp 16"


def _config(fsdp, **changes):
  mixer = DeltaNetConfig(key_size=64, value_size=64)
  model = preset("deltanet-tiny", width=128, mixers={"deltanet": mixer}, dtype="bfloat16")
  return TrainConfig(
    model=dataclasses.replace(model, remat="full"),
    data=DataConfig(length=256, batch=16),
    mesh=MeshConfig(data=1, fsdp=fsdp),
    tokens=2**16,
    grad_accum=2,
    loss_chunk=128,
    **changes,
  )


@pytest.mark.aot
@pytest.mark.parametrize("name, devices", [("h100x8", 8), ("v5e:2x2", 4)])
def test_training_step_compiles_and_fits(name, devices):
  cfg = _config(devices)
  machine = targets.machine(name)
  metrics = train_step.measure(cfg, machine)
  assert metrics["devices"] == devices and metrics["fits"] and not metrics["unknown_trip_counts"]
  assert metrics["memory"]["total"] == sum(
    n for part, n in metrics["memory"].items() if part != "total"
  )
  # Weights, optimizer moments and batch are sharded evenly, up to tile padding.
  assert metrics["memory"]["arguments"] * devices < 1.05 * metrics["argument_bytes"]
  # One forward kernel per layer and micro-batch, and one more for remat.
  assert metrics["kernels"]["delta_rule_fwd"] == 2 * cfg.model.depth * cfg.grad_accum
  # Each weight is gathered at least once per micro-batch.
  gathered = metrics["collectives"]["all-gather"]["bytes"]
  assert gathered >= metrics["parameters"]
  # Forward, backward and remat, except the last matmul of a layer.
  flops = sum(metrics["matmul_flops"].values()) * devices
  weights = metrics["parameters"] - cfg.model.vocab * cfg.model.width
  tokens = cfg.data.batch * cfg.data.length
  assert 3 <= flops / (2 * weights * tokens) <= 4
  assert "Fits:" in train_step_report.show(train_step_report.key_of("tiny", cfg, machine), metrics)
