"""Roofline upper bounds on training throughput."""

import pytest

from deltanet_jax.chips import CHIPS
from experiments.aot import roofline, targets, train_step


def test_roofline_seconds():
  x = dict(
    matmul_flops=dict(bf16=197e12), kernel_flops=197e12, hbm_bytes=8.2e11, interconnect_bytes=1e11
  )
  seconds = train_step.roofline_seconds(CHIPS["v5e"], x)
  assert seconds == pytest.approx(dict(compute=2.0, hbm=1.0, interconnect=0.5))


@pytest.mark.parametrize("name", ["h100x8", "v5e:4x4"])
@pytest.mark.parametrize("length", [2048, 16384])
def test_tokens_per_device_are_constant(name, length):
  machine = targets.machine(name)
  cfg = roofline.config("deltanet", length, machine.size, "full")
  cfg.validate()
  assert cfg.data.batch * length == 16384 * machine.size
  assert cfg.data.batch % machine.size == 0


FITS = dict(fits=True, roofline_seconds=dict(compute=2.0, hbm=1.0, interconnect=0.5))


@pytest.mark.parametrize(
  "name, made, remat",
  [
    ("h100x8", dict(none=FITS), "none"),
    ("h100x8", dict(none=dict(fits=False), full=FITS), "full"),
    ("h100x8", dict(none=RuntimeError("a crash\nmore"), full=FITS), "full"),
    ("v5e:4x4", dict(full=FITS), "full"),  # 16 GB: remat="none" is not tried
    ("v5e:4x4", dict(full=RuntimeError("a crash\nmore")), "full"),
  ],
)
def test_remat_is_used_only_if_needed(monkeypatch, name, made, remat):
  def measure(cfg, machine):
    found = made[cfg.model.remat]
    if isinstance(found, RuntimeError):
      raise found
    return dict(found)

  monkeypatch.setattr(train_step, "measure", measure)
  metrics = roofline.measure("deltanet", 2048, targets.machine(name))
  assert metrics["remat"] == remat
  if made[remat] is FITS:
    assert metrics["roofline_tokens_per_second"] == 16384 / 2
  else:
    assert metrics["error"] == "a crash" and not metrics["fits"]
