"""The command `device_check`, with interpreted kernels."""

import dataclasses

import jax.numpy as jnp
import pytest

from experiments import device_check
from experiments.bench import device_kernels
from pallas_kernels.common import gpu, measured_tiles
from pallas_kernels.delta_rule.pallas_gpu.tiles import (
  H100,
  OTHER,
  DeltaTileGPU,
  alternatives,
  tile_for,
)


def case(kernel, inputs="plain", dtype="float32"):
  found = device_kernels.cases(("tpu", "gpu"), interpret=True, triton=False)
  key = dict(kernel=kernel, inputs=inputs, dtype=dtype)
  return next(x for x in found if x.key == key)


def test_every_kernel_is_checked():
  names = {x.kernel for x in device_kernels.cases(("tpu", "gpu"), True, False)}
  delta_rules = {"pallas_tpu", "pallas_gpu", "pallas_gpu unfused"}
  others = ("step", "attention", "linear attention", "linear attention step", "short conv")
  on_both = {f"{x} {y}" for x in others for y in ("pallas_tpu", "pallas_gpu")}
  on_one = {"rope pallas_tpu", "qkv conv pallas_gpu", "head norm pallas_gpu"}
  assert names == delta_rules | on_both | on_one
  assert "triton" in {x.kernel for x in device_kernels.cases(("gpu",), False, True)}


@pytest.mark.parametrize("kernel", ["step pallas_gpu", "step pallas_tpu"])
def test_a_broken_kernel_fails(kernel):
  own = case(kernel, "full")
  assert device_check.check(own)["passes"]

  def broken(**arrays):
    o, S = own.run(**arrays)
    return o, S * 1.0001

  found = device_check.check(dataclasses.replace(own, run=broken))
  assert not found["passes"] and found["of"] == "S" and found["repeats"]
  raising = device_check.check(dataclasses.replace(own, run=lambda **_: 1 / 0))
  assert not raising["passes"] and raising["error"] == "division by zero"
  no_times = dict(seconds=None, plain_seconds=None)
  text = device_check.show([(own.key, found | no_times)])
  assert "FAIL" in text and "pass" not in text


def test_measured_tiles_are_used(tmp_path, monkeypatch):
  k = jnp.zeros((1, 2, 1, 128), jnp.bfloat16)
  own, other = (table["bfloat16", 128] for table in (OTHER, H100))
  monkeypatch.setenv("DELTANET_JAX_CACHE", str(tmp_path / "cache"))
  name = measured_tiles.entry("intra", "bfloat16", 128)
  assert alternatives("bfloat16", 128)["intra"] == other["intra"]
  path = measured_tiles.write("some GPU", {name: tuple(other["intra"])})
  assert [path] == list((tmp_path / "cache").iterdir())  # no temporary file is left
  assert tile_for("intra", k) == own["intra"]  # no GPU here
  device = type("Device", (), dict(device_kind="some GPU"))
  monkeypatch.setattr(gpu.jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(gpu.jax, "devices", lambda: [device])
  assert tile_for("intra", k) == other["intra"]
  with measured_tiles.override({"intra": (16, 16, 2, 1)}):
    assert tile_for("intra", k) == DeltaTileGPU(16, 16, 2)
  assert tile_for("fwd", k) == own["fwd"]


def test_a_corrupt_cache_of_measured_tiles_is_reported(tmp_path, monkeypatch):
  monkeypatch.setenv("DELTANET_JAX_CACHE", str(tmp_path))
  for text in ('{"some GPU": ', "[1]", '{"some GPU": 3}'):
    measured_tiles.cache_file().write_text(text)
    with pytest.raises(ValueError, match=r"measured_tiles\.json is not a valid cache .* delete it"):
      measured_tiles.write("some GPU", {})


def test_the_cache_of_measured_tiles_is_in_a_user_directory(monkeypatch):
  monkeypatch.delenv("DELTANET_JAX_CACHE", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
  assert str(measured_tiles.cache_file()) == "/xdg/deltanet_jax/measured_tiles.json"
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", "/home/user")
  path = "/home/user/.cache/deltanet_jax/measured_tiles.json"
  assert str(measured_tiles.cache_file()) == path
