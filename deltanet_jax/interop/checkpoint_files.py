"""Files of a public checkpoint: download from the Hugging Face hub, read config and tensors.

Errors about missing or damaged files are one-line messages that name the file.
"""

import atexit
import json
import pathlib
import re
import shutil
import tempfile

import ml_dtypes
import numpy as np
import safetensors

from deltanet_jax import object_storage
from deltanet_jax.files import as_path
from deltanet_jax.object_storage import ObjectPath

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DOWNLOADED = ["config.json", "model*.safetensors", _INDEX, "tokenizer.json", "tokenizer.model"]
_DOWNLOADED += ["special_tokens_map.json", "tokenizer_config.json"]
_DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}


def checkpoint_folder(name: str | pathlib.Path) -> pathlib.Path:
  """Return the local folder of a checkpoint.

  Downloads `owner/name` from the Hugging Face hub, and a folder on object storage.
  """
  folder = as_path(name)
  if isinstance(folder, ObjectPath) and folder.is_dir():
    # safetensors maps local files; the copy lives as long as the process.
    temporary = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return object_storage.download(folder, pathlib.Path(temporary) / folder.name)
  if folder.exists():
    return folder
  if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name)):
    raise ValueError(
      f"{name} does not exist, expected a folder, or owner/name on the Hugging Face hub."
    )
  try:
    import huggingface_hub
  except ImportError as e:
    raise ImportError(
      f"{name} is not a folder, and downloading from the hub needs the package huggingface_hub:"
      ' install it with `pip install "deltanet-jax[hub]"`, or pass a folder.'
    ) from e
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(str(name), allow_patterns=_DOWNLOADED))
  except Exception as e:  # the hub, its HTTP library and the system share no exception class
    if isinstance(e, OSError) and e.errno is not None:
      raise
    reason = (str(e).strip().splitlines() or [""])[0].rstrip(".")
    reason = f"{type(e).__name__}: {reason}"
    if getattr(e, "response", None) is not None:
      raise ValueError(
        f"{name} is not a folder, and the hub denied the download ({reason}): check the name, or"
        " log in with `hf auth login` if the repository is gated."
      ) from e
    raise OSError(
      f"{name} is not a folder, and the hub is unreachable ({reason}): download it on a machine"
      " with access, and pass that folder."
    ) from e


def read_config(folder: pathlib.Path) -> dict:
  """Read config.json."""
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(f"{folder} has no config.json, expected the folder of a public checkpoint.")
  return _read_json(path)


def tensor_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Return the file of each tensor: a single file, or the shards listed in the index."""
  if (folder / _SINGLE).exists():
    files = [folder / _SINGLE]
  elif (folder / _INDEX).exists():
    files = _shards(folder)
  else:
    raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}: download the weights too.")
  return {name: file for file in files for name in _read(file, lambda opened: opened.keys())}


def read_tensor(file: pathlib.Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Read a tensor; raises unless it has this shape and is float32 or bfloat16."""

  def check(opened):
    found = opened.get_slice(name)
    if found.get_dtype() not in _DTYPES:
      raise ValueError(
        f"{file} has {name} in {found.get_dtype()}, expected F32 or BF16 (float32 or bfloat16):"
        " save the checkpoint in one of them."
      )
    if tuple(found.get_shape()) != shape:
      raise ValueError(
        f"{file} has {name} of shape {found.get_shape()}, expected {list(shape)} according to"
        " config.json: both files must belong to the same checkpoint."
      )
    return opened.get_tensor(name)

  # Opened per tensor: pages of a mapped file count as resident memory until it is closed.
  return _read(file, check)


def _shards(folder):
  path = folder / _INDEX
  weight_map = _read_json(path).get("weight_map")
  if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
    raise ValueError(f"{path} is damaged (it has no weight_map): download it again.")
  shards = sorted(set(weight_map.values()))
  if missing := [shard for shard in shards if not (folder / shard).is_file()]:
    raise ValueError(
      f"{folder} lacks {len(missing)} of the {len(shards)} shards listed in {_INDEX}, e.g."
      f" {missing[0]}: download them too."
    )
  return [folder / shard for shard in shards]


def _read_json(path):
  try:
    values = json.loads(path.read_text())
  except ValueError as e:  # not JSON, or not text
    raise ValueError(f"{path} is damaged ({e}): download it again.") from e
  if not isinstance(values, dict):
    raise ValueError(f"{path} is damaged (it is not a JSON object): download it again.")
  return values


def _read(file, use):
  try:
    with safetensors.safe_open(file, framework="np") as opened:
      return use(opened)
  except safetensors.SafetensorError as e:
    with open(file, "rb") as start:
      if start.read(7) == b"version":
        raise ValueError(
          f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder."
        ) from e
    raise ValueError(f"{file} is damaged or incomplete ({e}): download it again.") from e
