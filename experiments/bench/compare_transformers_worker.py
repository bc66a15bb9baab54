"""Run layers of transformers with given weights; started by `compare_transformers`.

Runs in an environment with torch and transformers, so it imports nothing of this project. For every
request_NAME.npz in the folder it writes answer_NAME.npz: the output, and its VJP with a cotangent.
"""

import importlib
import json
import pathlib
import platform
import sys

import numpy as np

_MODELS = "transformers.models"
# Layer -> module, config class.
LAYERS = {
  "MambaMixer": (f"{_MODELS}.mamba.modeling_mamba", "MambaConfig"),
  "Mamba2Mixer": (f"{_MODELS}.mamba2.modeling_mamba2", "Mamba2Config"),
  "Zamba2MambaMixer": (f"{_MODELS}.zamba2.modeling_zamba2", "Zamba2Config"),
  "RwkvSelfAttention": (f"{_MODELS}.rwkv.modeling_rwkv", "RwkvConfig"),
  "xLSTMLayer": (f"{_MODELS}.xlstm.modeling_xlstm", "xLSTMConfig"),
  "OlmoHybridGatedDeltaNet": (f"{_MODELS}.olmo_hybrid.modeling_olmo_hybrid", "OlmoHybridConfig"),
  "Qwen3NextGatedDeltaNet": (f"{_MODELS}.qwen3_next.modeling_qwen3_next", "Qwen3NextConfig"),
  "KimiLinearDeltaAttention": (f"{_MODELS}.kimi_linear.modeling_kimi_linear", "KimiLinearConfig"),
}


def build(name, settings):
  module, config = LAYERS[name]
  module = importlib.import_module(module)
  config = getattr(module, config)(**settings)
  layer = getattr(module, name)
  return layer(config) if name == "xLSTMLayer" else layer(config, 0)


def answer(torch, request):
  layer = build(str(request["layer"]), json.loads(str(request["settings"]))).float().eval()
  prefix = "weights/"
  weights = {
    name.removeprefix(prefix): torch.tensor(request[name])
    for name in request.files
    if name.startswith(prefix)
  }
  layer.load_state_dict(weights, strict=True)
  x = torch.tensor(request["x"], requires_grad=True)
  y = layer(x)
  y = y[0] if isinstance(y, tuple) else y  # some return their state too
  y.backward(torch.tensor(request["dy"]))
  gradients = {f"{prefix}{name}": weight.grad for name, weight in layer.named_parameters()}
  found = dict(y=y.detach(), dx=x.grad, **gradients)
  return {name: array.numpy() for name, array in found.items()}


def main(folder):
  try:
    import torch
    import transformers
    import transformers.utils

    # If the package xlstm is installed, transformers defines no layer itself.
    transformers.utils.is_xlstm_available = lambda: False
    for path in sorted(folder.glob("request_*.npz")):
      found = answer(torch, np.load(path))
      np.savez(folder / path.name.replace("request", "answer"), **found)
  except ImportError as error:
    raise SystemExit(f"{error} (Python {platform.python_version()})") from error
  versions = dict(torch=torch.__version__, transformers=transformers.__version__)
  (folder / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
