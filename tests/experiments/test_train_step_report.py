"""The training step compiled for machines that are not here."""

import dataclasses

import pytest

from deltanet_jax.config import DataConfig, MeshConfig, TrainConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.models import preset
from experiments.aot import targets, train_step, train_step_report


def test_the_key_names_the_mesh_in_numbers():
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
def test_a_small_model_is_compiled(name, devices):
  cfg = _config(devices)
  machine = targets.machine(name)
  row = train_step.measure(cfg, machine)
  assert row["devices"] == devices and row["fits"] and not row["unknown_trip_counts"]
  assert row["memory"]["total"] == sum(n for part, n in row["memory"].items() if part != "total")
  # Weights, moments and rows are split: no device has more than its share and the padding of tiles.
  assert row["memory"]["arguments"] * devices < 1.05 * row["argument_bytes"]
  # One forward kernel for each layer and micro-batch, and once more where remat repeats it.
  assert row["kernels"]["delta_rule_fwd"] == 2 * cfg.model.depth * cfg.grad_accum
  # Each weight is gathered for every micro-batch at least once, and each gradient brought together.
  gathered = row["collectives"]["all-gather"]["bytes"]
  assert gathered >= row["parameters"]
  # Forward, backward and all that remat repeats but the last product of a layer.
  products = sum(row["matmul_flops"].values()) * devices
  weights = row["parameters"] - cfg.model.vocab * cfg.model.width
  tokens = cfg.data.batch * cfg.data.length
  assert 3 <= products / (2 * weights * tokens) <= 4
  assert "Fits:" in train_step_report.show(train_step_report.key_of("tiny", cfg, machine), row)
