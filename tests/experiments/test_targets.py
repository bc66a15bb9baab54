"""Chips and machines as AOT compilation targets."""

import pytest

from deltanet_jax import chips
from experiments.aot import targets


@pytest.mark.parametrize(
  "name", ["h100", "h100x0", "h100x12", "v5e:4", "v9:2x2", "v5ex8", "h100:2x2", "v4:2x2"]
)
def test_a_wrong_target_is_one_sentence(name):
  with pytest.raises(ValueError, match=r"^target is .*\.$"):
    targets.machine(name)


@pytest.mark.parametrize(
  "name, size, topology",
  [("h100x4", 4, "1x1x4"), ("h100x16", 16, "1x2x8"), ("v5p:4x4x4", 64, "v5p:4x4x4")],
)
def test_machines(name, size, topology):
  machine = targets.machine(name)
  assert (machine.size, machine.topology) == (size, topology)


def test_a_missing_wheel_is_named(monkeypatch):
  monkeypatch.setattr(targets, "ptxas", lambda: None)
  with pytest.raises(ValueError, match=r"nvidia-cuda-nvcc-cu12.*pip install -e \.\[aot\]"):
    targets.check_installed(["gpu"])


@pytest.mark.parametrize(
  "kind, chip",
  [
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("TPU v5 lite", "v5e"),
    ("TPU v5", "v5p"),
    ("TPU v6 lite", "v6e"),
    ("cpu", None),
  ],
)
def test_chips_by_device_kind(kind, chip):
  assert chips.find(kind) == (chips.CHIPS[chip] if chip else None)
