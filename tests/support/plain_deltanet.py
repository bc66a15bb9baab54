"""A DeltaNet checkpoint evaluated in float64 NumPy, straight from the format's description.

It shares no code with the library: tensors by their public names, one token and head at a time.
"""

import numpy as np


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


ACTIVATIONS = {
  "silu": silu,
  "relu": lambda x: np.maximum(x, 0),
  "elu": lambda x: 1 + np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
  "identity": lambda x: x,
}
NORMS = {
  "l2": lambda x: x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6),
  "sum": lambda x: x / (np.abs(x).sum(axis=-1, keepdims=True) + 1e-6),
}


def rms_norm(x, weight, eps):
  return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def conv(x, weight):
  """Depthwise and causal over `[L d]`; the last tap meets the current token."""
  d, _, W = weight.shape
  padded = np.concatenate([np.zeros((W - 1, d)), x])
  return sum(padded[i : i + len(x)] * weight[:, 0, i] for i in range(W))


def mixer(x, w, o):
  """One attention replacement over `[L D]`, w its tensors by short name, o the options."""
  L, H = len(x), o["num_heads"]
  q, k, v = (x @ w[f"{n}_proj"].T for n in "qkv")
  if o["use_short_conv"]:
    q, k, v = (conv(y, w[f"{n}_conv1d"]) for n, y in zip("qkv", (q, k, v)))
  q, k, v = (y.reshape(L, H, -1) for y in (q, k, silu(v)))
  q, k = (NORMS[o["qk_norm"]](ACTIVATIONS[o["qk_activation"]](y)) for y in (q, k))
  beta = sigmoid(x @ w["b_proj"].T) * (2 if o["allow_neg_eigval"] else 1)
  y = np.zeros_like(v)
  for h in range(H):
    S = np.zeros((k.shape[2], v.shape[2]))
    for t in range(L):
      S = S + beta[t, h] * np.outer(k[t, h], v[t, h] - k[t, h] @ S)
      y[t, h] = q[t, h] @ S / np.sqrt(k.shape[2])
  y = rms_norm(y, w["o_norm"], o["norm_eps"])
  if o["use_gate"]:
    y = y * silu(x @ w["g_proj"].T).reshape(y.shape)
  return y.reshape(L, -1) @ w["o_proj"].T


def logits(tokens, tensors, o):
  """`[L V]` for tokens `[L]`, from the tensors and options of a checkpoint."""
  w = {name.removesuffix(".weight"): x.astype(np.float64) for name, x in tensors.items()}
  x = w["model.embeddings"][tokens]
  for i in range(o["num_hidden_layers"]):
    start = f"model.layers.{i}."
    layer = {n.removeprefix(start): y for n, y in w.items() if n.startswith(start)}
    attention = {n.removeprefix("attn."): y for n, y in layer.items()}
    x = x + mixer(rms_norm(x, layer["attn_norm"], o["norm_eps"]), attention, o)
    y = rms_norm(x, layer["mlp_norm"], o["norm_eps"])
    inner = silu(y @ layer["mlp.gate_proj"].T) * (y @ layer["mlp.up_proj"].T)
    x = x + inner @ layer["mlp.down_proj"].T
  head = w["model.embeddings" if o["tie_word_embeddings"] else "lm_head"]
  return rms_norm(x, w["model.norm"], o["norm_eps"]) @ head.T
