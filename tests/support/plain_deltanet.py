"""Float64 NumPy evaluation of a public (FLA) checkpoint, written from the format's description.

It shares no code with the library: tensors by their public names, loops over tokens and heads.
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
  """Causal depthwise convolution of x `[L d]`; the last tap is that of the current token."""
  d, _, W = weight.shape
  padded = np.concatenate([np.zeros((W - 1, d)), x])
  return sum(padded[i : i + len(x)] * weight[:, 0, i] for i in range(W))


def delta_rule(q, k, v, beta, g, S):
  """Return outputs `[L H dv]` and the final state `[H dk dv]`; g is the log decay."""
  S, y = S.copy(), np.zeros_like(v)
  for t in range(len(q)):
    for h in range(q.shape[1]):
      decayed = np.exp(g[t, h]) * S[h]
      S[h] = decayed + beta[t, h] * np.outer(k[t, h], v[t, h] - k[t, h] @ decayed)
      y[t, h] = q[t, h] @ S[h] / np.sqrt(q.shape[2])
  return y, S


def delta_mixer(x, w, o):
  """DeltaNet or Gated DeltaNet on x `[L D]`, with tensors w by short name and options o."""
  L, H, gated = len(x), o["num_heads"], o["model_type"] == "gated_deltanet"
  q, k, v = (x @ w[f"{n}_proj"].T for n in "qkv")
  if o["use_short_conv"]:
    q, k, v = (conv(y, w[f"{n}_conv1d"]) for n, y in zip("qkv", (q, k, v)))
  q, k, v = (y.reshape(L, H, -1) for y in (q, k, silu(v)))
  activation, norm = ("silu", "l2") if gated else (o["qk_activation"], o["qk_norm"])
  q, k = (NORMS[norm](ACTIVATIONS[activation](y)) for y in (q, k))
  beta = sigmoid(x @ w["b_proj"].T) * (2 if o["allow_neg_eigval"] else 1)
  g = np.zeros((L, H))
  if gated:
    g = -np.exp(w["A_log"]) * np.log1p(np.exp(x @ w["a_proj"].T + w["dt_bias"]))
  y, _ = delta_rule(q, k, v, beta, g, np.zeros((H, k.shape[2], v.shape[2])))
  y = rms_norm(y, w["o_norm"], o["norm_eps"])
  if o["use_gate"]:
    y = y * silu(x @ w["g_proj"].T).reshape(y.shape)
  return y.reshape(L, -1) @ w["o_proj"].T


def rope(x, theta):
  """Rotate the pairs (i, i + d/2) of x `[L H d]` by the angle t theta^(-2i/d)."""
  L, _, d = x.shape
  rotation = np.exp(1j * np.outer(np.arange(L), theta ** (-2 * np.arange(d // 2) / d)))
  z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * rotation[:, None]
  return np.concatenate([z.real, z.imag], axis=-1)


def attention(x, w, o):
  """Softmax attention on x `[L D]`; o is one entry of the option `attn`."""
  L, D = x.shape
  d = D // o["num_heads"]
  q, k, v = ((x @ w[f"{n}_proj"].T).reshape(L, -1, d) for n in "qkv")
  q, k = rope(q, o.get("rope_theta", 10000.0)), rope(k, o.get("rope_theta", 10000.0))
  y = np.zeros_like(q)
  for t in range(L):
    first = 0 if o.get("window_size") is None else max(t + 1 - o["window_size"], 0)
    for h in range(q.shape[1]):
      group = h // (q.shape[1] // k.shape[1])  # grouped-query attention
      p = np.exp(k[first : t + 1, group] @ q[t, h] / np.sqrt(d))
      y[t, h] = p @ v[first : t + 1, group] / p.sum()
  return y.reshape(L, -1) @ w["o_proj"].T


def logits(tokens, tensors, o):
  """Return logits `[L V]` of tokens `[L]`, from the tensors and options of a checkpoint."""
  w = {name.removesuffix(".weight"): x.astype(np.float64) for name, x in tensors.items()}
  x = w["model.embeddings"][tokens]
  groups = [o["attn"]] if isinstance(o["attn"], dict) else o["attn"] or []
  attention_layers = {i: group for group in groups for i in group["layers"]}
  for i in range(o["num_hidden_layers"]):
    start = f"model.layers.{i}."
    layer = {n.removeprefix(start): y for n, y in w.items() if n.startswith(start)}
    own = {n.removeprefix("attn."): y for n, y in layer.items()}
    mixer = attention if i in attention_layers else delta_mixer
    x = x + mixer(rms_norm(x, layer["attn_norm"], o["norm_eps"]), own, attention_layers.get(i, o))
    y = rms_norm(x, layer["mlp_norm"], o["norm_eps"])
    inner = silu(y @ layer["mlp.gate_proj"].T) * (y @ layer["mlp.up_proj"].T)
    x = x + inner @ layer["mlp.down_proj"].T
  head = w["model.embeddings" if o["tie_word_embeddings"] else "lm_head"]
  return rms_norm(x, w["model.norm"], o["norm_eps"]) @ head.T
