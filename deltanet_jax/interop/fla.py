"""Public DeltaNet checkpoints (safetensors and config.json): loading and saving."""

import json
import pathlib
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from deltanet_jax.files import new_folder
from deltanet_jax.interop.fla_config import from_fla, to_fla
from deltanet_jax.models import LM
from deltanet_jax.models.build import abstract

_LAYER = {
  ("mixer_norm", "scale"): "attn_norm",
  ("mixer", "qkv", "q", "kernel"): "attn.q_proj",
  ("mixer", "qkv", "k", "kernel"): "attn.k_proj",
  ("mixer", "qkv", "v", "kernel"): "attn.v_proj",
  ("mixer", "qkv", "q_conv", "kernel"): "attn.q_conv1d",
  ("mixer", "qkv", "k_conv", "kernel"): "attn.k_conv1d",
  ("mixer", "qkv", "v_conv", "kernel"): "attn.v_conv1d",
  ("mixer", "beta", "kernel"): "attn.b_proj",
  ("mixer", "output", "gate", "kernel"): "attn.g_proj",
  ("mixer", "output", "norm", "scale"): "attn.o_norm",
  ("mixer", "output", "out", "kernel"): "attn.o_proj",
  ("mlp_norm", "scale"): "mlp_norm",
  ("mlp", "gate", "kernel"): "mlp.gate_proj",
  ("mlp", "up", "kernel"): "mlp.up_proj",
  ("mlp", "down", "kernel"): "mlp.down_proj",
}
_TOP = {
  ("embedding",): "model.embeddings.weight",
  ("norm", "scale"): "model.norm.weight",
  ("head", "kernel"): "lm_head.weight",
}


def load_fla(folder: str | pathlib.Path, dtype: str | None = None) -> LM:
  """The model of a checkpoint folder, callable on tokens; weights become float32.

  Args:
    dtype: of the computation; None takes the one in config.json.
  """
  folder = pathlib.Path(folder)
  cfg = from_fla(json.loads((folder / "config.json").read_text()))
  if dtype is not None:
    cfg.dtype = dtype
    cfg.validate()
  model = abstract(cfg)
  tensors = _read(folder)
  weights = list(nnx.to_flat_state(nnx.state(model, nnx.Param)))
  expected = {name for path, weight in weights for name in _names(path, weight.shape)}
  _same_names(expected, set(tensors), folder)
  arrays = [_join(path, weight.shape, tensors) for path, weight in weights]
  # The flat state lists weights in the order of the module's leaves, but by path is safer.
  loaded = nnx.from_flat_state([(p, w.replace(a)) for (p, w), a in zip(weights, arrays)])
  nnx.update(model, loaded)
  return model


def save_fla(
  model: LM, folder: str | pathlib.Path, dtype: Literal["float32", "bfloat16"] | None = None
):
  """Writes config.json and model.safetensors to a new folder; they load as the same model.

  Args:
    dtype: of the tensors. None takes bfloat16 if the model computes in it and no weight would be
      rounded, float32 else.
  """
  options = to_fla(model.cfg)
  if dtype not in (None, "float32", "bfloat16"):
    raise ValueError(f"dtype is {dtype!r}, expected 'float32' or 'bfloat16'.")
  tensors = fla_tensors(model)
  if dtype is None:
    rounded = lambda x: x.astype(ml_dtypes.bfloat16).astype(x.dtype)
    exact = all(np.array_equal(rounded(x), x) for x in tensors.values())
    dtype = "bfloat16" if model.cfg.dtype == "bfloat16" and exact else "float32"
  kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
  tensors = {name: np.ascontiguousarray(x.astype(kind)) for name, x in tensors.items()}
  with new_folder(pathlib.Path(folder)) as new:
    try:
      safetensors.numpy.save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    except safetensors.SafetensorError as e:
      raise OSError(f"{folder} cannot be written ({e}): name a folder that can.") from e
    (new / "config.json").write_text(json.dumps(options, indent=2, sort_keys=True) + "\n")


def fla_tensors(model: LM) -> dict[str, np.ndarray]:
  """The weights of a model (or of its gradient) under their public names and shapes."""
  tensors = {}
  for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    value = np.asarray(weight[...])
    names = _names(path, value.shape)
    layers = value if path[0] == "stacks" else [value]
    tensors |= {name: _turn(name, layer) for name, layer in zip(names, layers)}
  return tensors


def _names(path, shape):
  """Public names of one weight: one, or one per layer of its stack."""
  if path[0] != "stacks":
    return [_TOP[path]]
  # stacks.0.unit.blocks.0: only DeltaNet layers, so one stack of units of one block.
  assert path[:5] == ("stacks", 0, "unit", "blocks", 0), path
  return [f"model.layers.{i}.{_LAYER[path[5:]]}.weight" for i in range(shape[0])]


def _turn(name, x):
  """One layer's weight in its public shape, or back: both are the same but for convolutions."""
  if name.endswith("conv1d.weight"):
    return x.T[:, None, :]
  return x if x.ndim < 2 or name == "model.embeddings.weight" else x.T


def _join(path, shape, tensors):
  layers = []
  for name in _names(path, shape):
    x = tensors[name]
    want = _turn(name, np.empty(shape[1:] if path[0] == "stacks" else shape)).shape
    if x.shape != want:
      raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(want)}.")
    if x.dtype not in (np.float32, ml_dtypes.bfloat16):
      raise ValueError(f"{name} has dtype {x.dtype}, expected float32 or bfloat16.")
    x = x.astype(np.float32)
    layers.append(x[:, 0, :].T if name.endswith("conv1d.weight") else _turn(name, x))
  return jnp.asarray(np.stack(layers) if path[0] == "stacks" else layers[0])


def _read(folder):
  """All tensors of a folder: one file, or the parts that an index lists."""
  index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
  if single.exists():
    files = [single]
  elif index.exists():
    parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = [folder / part for part in parts]
  else:
    raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json.")
  tensors = {}
  for file in files:
    tensors |= safetensors.numpy.load_file(file)
  return tensors


def _same_names(expected, found, folder):
  if missing := sorted(expected - found):
    raise ValueError(f"{folder} lacks {len(missing)} tensors, for instance {missing[:3]}.")
  if extra := sorted(found - expected):
    raise ValueError(
      f"{folder} has {len(extra)} tensors that its config.json leaves no place for,"
      f" for instance {extra[:3]}."
    )
