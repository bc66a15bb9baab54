"""Files of public checkpoints: shards, damaged or missing files, the hub, peak memory."""

import json
import pathlib
import shutil
import subprocess
import sys
import types

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from deltanet_jax.interop import load_fla, save_fla
from deltanet_jax.models import preset
from deltanet_jax.models.build import abstract
from experiments.lib import provenance

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "model_f32_T40"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAME = "model.layers.1.attn.k_proj.weight"


@pytest.fixture(scope="module")
def tensors():
  return safetensors.numpy.load_file(GOLDEN / SINGLE)


@pytest.fixture
def folder(tmp_path):
  shutil.copy(GOLDEN / "config.json", tmp_path)
  return tmp_path


def write(folder, tensors):
  safetensors.numpy.save_file(tensors, folder / SINGLE)


def write_shards(folder, tensors):
  """Write two shards with an index; return their paths."""
  shards = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
  weight_map = {name: shards[i % 2] for i, name in enumerate(sorted(tensors))}
  for shard in shards:
    stored = {name: x for name, x in tensors.items() if weight_map[name] == shard}
    safetensors.numpy.save_file(stored, folder / shard)
  (folder / INDEX).write_text(json.dumps(dict(metadata=dict(total_size=1), weight_map=weight_map)))
  return [folder / shard for shard in shards]


def assert_same_weights(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def test_shards_with_an_index_and_bfloat16(folder, tensors):
  rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
  # Norms stay in float32 in some files.
  rounded |= {name: x for name, x in tensors.items() if "norm" in name}
  write_shards(folder, rounded)
  model = load_fla(folder)
  assert {x.dtype for x in jax.tree.leaves(model)} == {np.dtype("float32")}
  write(folder, {name: x.astype(np.float32) for name, x in rounded.items()})
  assert_same_weights(model, load_fla(folder))


def test_wrong_tensors_raise(folder, tensors):
  with pytest.raises(ValueError, match=rf"{folder} has neither model.safetensors nor .* download"):
    load_fla(folder)
  write(folder, {n: x for n, x in tensors.items() if n != NAME})
  with pytest.raises(ValueError, match=f"{folder} lacks 1 tensors.*{NAME}"):
    load_fla(folder)
  write(folder, tensors | {"model.layers.2.attn_norm.weight": np.ones(64, np.float32)})
  with pytest.raises(ValueError, match=r"does not describe.*layers.2"):
    load_fla(folder)
  for dtype, name in ((np.float16, "F16"), (ml_dtypes.float8_e4m3fn, "F8_E4M3"), (int, "I64")):
    write(folder, tensors | {NAME: tensors[NAME].astype(dtype)})
    with pytest.raises(ValueError, match=f"{folder}/{SINGLE} has {NAME} in {name}, expected F32"):
      load_fla(folder)
  write(folder, tensors | {NAME: tensors[NAME][:32].copy()})
  with pytest.raises(ValueError, match=rf"{SINGLE} has {NAME} of shape \[32, 64\], expected \[64"):
    load_fla(folder)


def truncate(path):
  path.write_bytes(path.read_bytes()[:-100])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
DAMAGES = {
  "truncated": (truncate, "is damaged or incomplete .*: download it again"),
  "empty": (lambda path: path.write_bytes(b""), "is damaged or incomplete .*: download it again"),
  "pointer": (lambda path: path.write_bytes(POINTER), "is a Git LFS pointer.*git lfs pull"),
}


@pytest.mark.parametrize("damage,message", DAMAGES.values(), ids=DAMAGES)
def test_errors_name_damaged_weights(folder, tensors, damage, message):
  path = write_shards(folder, tensors)[1]
  damage(path)
  with pytest.raises(ValueError, match=f"{path} {message}"):
    load_fla(folder)


def test_invalid_index_and_config_raise(folder, tensors):
  path = write_shards(folder, tensors)[1]
  path.unlink()
  with pytest.raises(ValueError, match=f"{folder} lacks 1 of the 2 shards .*{path.name}: download"):
    load_fla(folder)
  for text in ('{"weight_map": {', "[]", "{}", '{"weight_map": {"x": 1}}'):
    (folder / INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"{folder / INDEX} is damaged .*: download it again"):
      load_fla(folder)
  (folder / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config.json is damaged .*: download it again"):
    load_fla(folder)
  (folder / "config.json").unlink()
  with pytest.raises(ValueError, match=f"{folder} has no config.json, expected the folder"):
    load_fla(folder)
  with pytest.raises(
    ValueError, match=r"not/there/at/all does not exist, expected a folder, or owner"
  ):
    load_fla("not/there/at/all")


def hub(monkeypatch, download):
  fake = types.ModuleType("huggingface_hub")
  fake.snapshot_download = download
  monkeypatch.setitem(sys.modules, "huggingface_hub", fake)


def test_download_from_the_hub(monkeypatch, tmp_path):
  requested = []

  def download(name, allow_patterns):
    requested.append((name, allow_patterns))
    return str(GOLDEN)

  hub(monkeypatch, download)
  assert_same_weights(load_fla("owner/some-model_1.3B"), load_fla(GOLDEN))
  ((name, patterns),) = requested
  assert name == "owner/some-model_1.3B"
  assert {"config.json", "model*.safetensors", INDEX, "tokenizer.json"} <= set(patterns)
  # An existing folder is never downloaded.
  monkeypatch.chdir(tmp_path)
  shutil.copytree(GOLDEN, "owner/here")
  load_fla("owner/here")
  assert len(requested) == 1


class HubError(OSError):
  """Like the hub's own errors, with a response."""

  response = "404"


@pytest.mark.parametrize(
  "error,kind,message",
  [
    (
      HubError("404 Client Error.\n\nRepository Not Found"),
      ValueError,
      r"denied the download .*404 Client Error\).*hf auth login",
    ),
    (OSError("Got: ConnectError\nmore"), OSError, r"unreachable \(OSError: Got: ConnectEr"),
    (RuntimeError(), OSError, "unreachable .*: download it on a machine with access, and pass"),
    (OSError(28, "No space left on device"), OSError, "No space left on device"),
  ],
)
def test_hub_errors_are_one_line_messages(monkeypatch, error, kind, message):
  def fail(*_, **__):
    raise error

  hub(monkeypatch, fail)
  with pytest.raises(kind, match=message) as raised:
    load_fla("owner/model")
  assert "\n" not in str(raised.value)


def test_without_huggingface_hub(monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(ImportError, match=r"owner/model is not a folder.*pip install .*\[hub\]"):
    load_fla("owner/model")


# In its own process: the peak memory of a process never decreases.
PEAK = """
import re, sys, jax
from deltanet_jax.interop import load_fla

def peak():
  return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024

jax.device_put(0.0).block_until_ready()
before = peak()
model = jax.block_until_ready(load_fla(sys.argv[1]))
print((peak() - before) / sum(x.nbytes for x in jax.tree.leaves(model)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_loading_is_little_more_than_the_model(tmp_path):
  model = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract(preset("deltanet-340m")))
  save_fla(model, tmp_path / "big", dtype="bfloat16")
  del model
  command = [sys.executable, "-c", PEAK, tmp_path / "big"]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  # The parameters, a second copy of the largest one, and Python's overhead.
  assert float(done.stdout) < 1.3, done.stdout


def test_saved_files_are_readable_by_other_users(tmp_path):
  save_fla(load_fla(GOLDEN), tmp_path / "new")
  modes = {path.name: path.stat().st_mode for path in (tmp_path / "new").iterdir()}
  assert modes[SINGLE] == modes["config.json"]


def test_generate_reports_damage_in_one_line(folder, tensors):
  write(folder, tensors)
  truncate(folder / SINGLE)
  command = [sys.executable, "-m", "experiments.generate", "--prompt=1", f"--checkpoint={folder}"]
  done = subprocess.run(command, cwd=provenance.CHECKOUT, capture_output=True, text=True)
  assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
  assert done.stderr.splitlines()[-1].startswith(f"generate: {folder}/{SINGLE} is damaged or")
