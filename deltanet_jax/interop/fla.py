"""Load and save flash-linear-attention checkpoints (safetensors and config.json).

Supports DeltaNet and Gated DeltaNet, and hybrids of either with softmax attention.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Literal

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from deltanet_jax.files import new_folder
from deltanet_jax.interop.fla_config import from_fla, to_fla
from deltanet_jax.interop.fla_files import checkpoint_folder, read_config, read_tensor, tensor_files
from deltanet_jax.models import LM
from deltanet_jax.models.build import abstract

# Public names of a layer's parameters, by their path in a block.
_LAYER = {
  ("mixer_norm", "scale"): "attn_norm.weight",
  ("mixer", "qkv", "q", "kernel"): "attn.q_proj.weight",
  ("mixer", "qkv", "k", "kernel"): "attn.k_proj.weight",
  ("mixer", "qkv", "v", "kernel"): "attn.v_proj.weight",
  ("mixer", "qkv", "q_conv", "kernel"): "attn.q_conv1d.weight",
  ("mixer", "qkv", "k_conv", "kernel"): "attn.k_conv1d.weight",
  ("mixer", "qkv", "v_conv", "kernel"): "attn.v_conv1d.weight",
  ("mixer", "beta", "kernel"): "attn.b_proj.weight",
  ("mixer", "decay", "kernel"): "attn.a_proj.weight",
  ("mixer", "A_log"): "attn.A_log",
  ("mixer", "dt_bias"): "attn.dt_bias",
  ("mixer", "output", "gate", "kernel"): "attn.g_proj.weight",
  ("mixer", "output", "norm", "scale"): "attn.o_norm.weight",
  ("mixer", "output", "out", "kernel"): "attn.o_proj.weight",
  # Attention.
  ("mixer", "q", "kernel"): "attn.q_proj.weight",
  ("mixer", "k", "kernel"): "attn.k_proj.weight",
  ("mixer", "v", "kernel"): "attn.v_proj.weight",
  ("mixer", "out", "kernel"): "attn.o_proj.weight",
  ("mlp_norm", "scale"): "mlp_norm.weight",
  ("mlp", "gate", "kernel"): "mlp.gate_proj.weight",
  ("mlp", "up", "kernel"): "mlp.up_proj.weight",
  ("mlp", "down", "kernel"): "mlp.down_proj.weight",
}
_TOP = {
  ("embedding",): "model.embeddings.weight",
  ("norm", "scale"): "model.norm.weight",
  ("head", "kernel"): "lm_head.weight",
}


def load_fla(checkpoint: str | pathlib.Path, dtype: str | None = None) -> LM:
  """Load a public checkpoint as a model, with float32 parameters.

  Args:
    checkpoint: A folder, or owner/name of a repository on the Hugging Face hub.
    dtype: Computation dtype; None uses the one in config.json.
  """
  folder = checkpoint_folder(checkpoint)
  cfg = from_fla(read_config(folder))
  if dtype is not None:
    cfg.dtype = dtype
    cfg.validate()
  model = abstract(cfg)
  files = tensor_files(folder)
  weights = list(nnx.to_flat_state(nnx.state(model, nnx.Param)))
  names = [_names(model, path) for path, _ in weights]
  _same_names({name for layers in names for name in layers}, set(files), folder)
  # One parameter at a time: peak memory is the model plus one parameter.
  loaded = [(path, w.replace(_join(n, w.shape, files))) for n, (path, w) in zip(names, weights)]
  # Updates by path, so that the order of the flat state does not matter.
  nnx.update(model, nnx.from_flat_state(loaded))
  return model


def save_fla(
  model: LM,
  folder: str | pathlib.Path,
  dtype: Literal["float32", "bfloat16"] | None = None,
  extra_files: Mapping[str, bytes] | None = None,
):
  """Save config.json and model.safetensors to a new folder; `load_fla` restores the same model.

  Args:
    model: The model.
    folder: New or empty folder.
    dtype: Of the tensors. None uses bfloat16 if the model computes in it and this rounds no
      parameter, else float32.
    extra_files: Contents of further files by name, such as a tokenizer's (`Tokenizer.files`).

  Raises:
    ValueError: The format cannot represent the model; the message gives the reason.
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
      raise OSError(f"{folder} cannot be written ({e}): choose a writable folder.") from e
    for name, content in (extra_files or {}).items():
      (new / name).write_bytes(content)
    config = new / "config.json"
    config.write_text(json.dumps(options, indent=2, sort_keys=True) + "\n")
    # safetensors creates its file readable only by its owner.
    (new / "model.safetensors").chmod(config.stat().st_mode)


def fla_tensors(model: LM) -> dict[str, np.ndarray]:
  """Return the parameters of a model (or its gradient) with their public names and shapes."""
  tensors = {}
  for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    value = np.asarray(weight[...])
    layers = value if path[0] == "stacks" else [value]
    names = _names(model, path)
    tensors |= {name: _public(name, layer) for name, layer in zip(names, layers, strict=True)}
  return tensors


def _names(model, path):
  """Return the public names of one parameter; one per layer if it is stacked."""
  if path[0] != "stacks":
    return [_TOP[path]]
  _, stack, _, _, block, *rest = path  # stacks.0.unit.blocks.0.<path in the block>
  *before, own = list(model.stacks)[: stack + 1]
  first = sum(s.times * len(s.names) for s in before) + block
  layers = range(first, first + own.times * len(own.names), len(own.names))
  return [f"model.layers.{i}.{_LAYER[tuple(rest)]}" for i in layers]


def _public(name, x):
  """Return one layer's parameter in its public shape, as a view."""
  if name.endswith("conv1d.weight"):
    return x.T[:, None, :]
  return x if x.ndim < 2 or name == "model.embeddings.weight" else x.T


def _join(names, shape, files):
  """Read a parameter, stacked over layers, from the files."""
  joined = np.empty(shape, np.float32)
  # Views in the public shape; writing to them fills `joined`.
  views = [_public(names[0], joined)] if names[0] in _TOP.values() else map(_public, names, joined)
  for name, view in zip(names, views, strict=True):
    view[...] = read_tensor(files[name], name, view.shape)
  # `jnp.asarray` would copy twice. Blocking limits the memory to one parameter in flight.
  return jax.block_until_ready(jax.device_put(joined))


def _same_names(expected, found, folder):
  if missing := sorted(expected - found):
    raise ValueError(f"{folder} lacks {len(missing)} tensors, e.g. {missing[:3]}.")
  if extra := sorted(found - expected):
    raise ValueError(
      f"{folder} has {len(extra)} tensors that its config.json does not describe, e.g. {extra[:3]}."
    )
