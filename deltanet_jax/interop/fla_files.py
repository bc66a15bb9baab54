"""Files of a public checkpoint, from a folder or the Hugging Face hub; damage in one sentence."""

import json
import pathlib
import re

import ml_dtypes
import numpy as np
import safetensors

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WANTED = ["config.json", "model*.safetensors", _INDEX, "tokenizer.json", "tokenizer.model"]
_WANTED += ["special_tokens_map.json", "tokenizer_config.json"]
_DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}


def checkpoint_folder(name: str | pathlib.Path) -> pathlib.Path:
  """The folder of a checkpoint: itself, or of what the hub has under `owner/name`, downloaded."""
  folder = pathlib.Path(name)
  if folder.exists():
    return folder
  if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name)):
    raise ValueError(f"{name} is not there: name a folder, or owner/name on the Hugging Face hub.")
  try:
    import huggingface_hub
  except ImportError as e:
    raise ImportError(
      f"{name} is no folder, and the hub is read by huggingface_hub, which is not installed:"
      ' install it with `pip install "deltanet-jax[hub]"`, or name a folder.'
    ) from e
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(str(name), allow_patterns=_WANTED))
  except Exception as e:  # of its own, of its HTTP library, of the system: they share no class
    if isinstance(e, OSError) and e.errno is not None:
      raise
    reason = (str(e).strip().splitlines() or [""])[0].rstrip(".")
    reason = f"{type(e).__name__}: {reason}"
    if getattr(e, "response", None) is not None:
      raise ValueError(
        f"{name} is no folder, and the hub does not give it ({reason}): check the name, or log in"
        " with `hf auth login` if it needs leave."
      ) from e
    raise OSError(
      f"{name} is no folder, and the hub cannot be reached ({reason}): download it where it can"
      " be, and name that folder."
    ) from e


def read_config(folder: pathlib.Path) -> dict:
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(f"{folder} has no config.json: name the folder of a public checkpoint.")
  return _read_json(path)


def tensor_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """The file of each tensor: one for all, or the parts that an index lists."""
  if (folder / _SINGLE).exists():
    files = [folder / _SINGLE]
  elif (folder / _INDEX).exists():
    files = _parts(folder)
  else:
    raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}: download one of them as well.")
  return {name: file for file in files for name in _read(file, lambda opened: opened.keys())}


def read_tensor(file: pathlib.Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """One tensor, which must be of this shape and float32 or bfloat16."""

  def check(opened):
    found = opened.get_slice(name)
    if found.get_dtype() not in _DTYPES:
      raise ValueError(
        f"{file} has {name} in {found.get_dtype()}, expected F32 or BF16 (float32 or bfloat16):"
        " save the checkpoint in one of them."
      )
    if tuple(found.get_shape()) != shape:
      raise ValueError(
        f"{file} has {name} of shape {found.get_shape()}, expected {list(shape)} by its"
        " config.json: take both of one checkpoint."
      )
    return opened.get_tensor(name)

  # Opened for one tensor: pages of a mapped file count as memory until it is closed.
  return _read(file, check)


def _parts(folder):
  path = folder / _INDEX
  where = _read_json(path).get("weight_map")
  if not isinstance(where, dict) or not all(isinstance(part, str) for part in where.values()):
    raise ValueError(f"{path} is damaged (it has no weight_map): download it again.")
  parts = sorted(set(where.values()))
  if missing := [part for part in parts if not (folder / part).is_file()]:
    raise ValueError(
      f"{folder} lacks {len(missing)} of the {len(parts)} parts that its {_INDEX} lists, for"
      f" instance {missing[0]}: download them as well."
    )
  return [folder / part for part in parts]


def _read_json(path):
  try:
    values = json.loads(path.read_text())
  except ValueError as e:  # no JSON, or no text
    raise ValueError(f"{path} is damaged ({e}): download it again.") from e
  if not isinstance(values, dict):
    raise ValueError(f"{path} is damaged (it holds no names with values): download it again.")
  return values


def _read(file, use):
  try:
    with safetensors.safe_open(file, framework="np") as opened:
      return use(opened)
  except safetensors.SafetensorError as e:
    with open(file, "rb") as start:
      if start.read(7) == b"version":
        raise ValueError(
          f"{file} is a pointer of Git LFS, not the weights: run `git lfs pull` in its folder."
        ) from e
    raise ValueError(f"{file} is damaged or not whole ({e}): download it again.") from e
