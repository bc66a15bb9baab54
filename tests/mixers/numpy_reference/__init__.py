"""Reference implementations of all mixers: float64 NumPy loops over tokens.

Each file is named after the kind of its mixer. `plain(mixer, x)` applies the formula with the
mixer's weights to one sequence x `[L D]` and returns y `[L D]`. Constants of the formula are
literals, not read from the config. `MUTATIONS` are replacements in the mixer's source that the
comparison must detect.

Nothing here may import deltanet_jax; the references share only the functions below.
"""

import numpy as np


def array(weight):
  return np.asarray(weight[...], np.float64)


def linear(layer, x):
  y = x @ array(layer.kernel)
  return y if layer.bias is None else y + array(layer.bias)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def softplus(x):
  return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def rms_norm(x, scale, eps=1e-6):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * array(scale)


def l2_norm(x):
  return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def short_conv(conv, x):
  """Causal depthwise convolution with zeros before the first token; x itself without one."""
  if conv is None:
    return x
  kernel = array(conv.kernel)
  y = np.zeros_like(x)
  for t in range(len(x)):
    for back in range(min(len(kernel), t + 1)):
      y[t] += kernel[len(kernel) - 1 - back] * x[t - back]
  return y if conv.bias is None else y + array(conv.bias)


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def projections(qkv, x):
  """q, k and v: projections of x, followed by short convolutions if the mixer has them."""
  for projection, conv in ((qkv.q, qkv.q_conv), (qkv.k, qkv.k_conv), (qkv.v, qkv.v_conv)):
    yield short_conv(conv, linear(projection, x))


def convolved(qkv, x):
  """q, k and v, with SiLU after the convolutions; without convolutions no activation."""
  return (y if qkv.q_conv is None else silu(y) for y in projections(qkv, x))


def heads(x, H):
  """Split heads: `[L d]` to `[L H d/H]`."""
  return x.reshape(len(x), H, -1)


def rope(x):
  """Rotate the pairs (i, i + d/2) of x `[L H d]` by the angle t 10000^(-2i/d)."""
  half = x.shape[-1] // 2
  y = np.zeros_like(x)
  for t in range(len(x)):
    angle = t * 10000.0 ** (-2 * np.arange(half) / (2 * half))
    a, b = x[t, :, :half], x[t, :, half:]
    y[t, :, :half] = a * np.cos(angle) - b * np.sin(angle)
    y[t, :, half:] = a * np.sin(angle) + b * np.cos(angle)
  return y


def hyena_filter(layer, length, taps):
  """h `[taps filters]`: an MLP of the position s with three sine layers, times a window."""
  filters = layer.last.shape[1]
  h = np.zeros((taps, filters))
  for s in range(min(taps, length)):
    t = s / (length - 1)
    bands = (layer.kernels[0].shape[0] - 1) // 2
    waves = np.exp(-1j * 2 * np.pi * s / length * np.linspace(1e-4, bands - 1, bands))
    x = np.concatenate([[t], waves.real, waves.imag])
    for kernel, bias in zip(layer.kernels, layer.biases):
      x = np.sin(array(layer.frequency) * (x @ array(kernel) + array(bias)))
    rates = np.linspace(np.log(100) / 1.5, np.log(100) / 0.3, filters)
    h[s] = (x @ array(layer.last)) * np.exp(-rates * t)
  return h


def head_output(output, o, x):
  """Per-head RMSNorm of o `[L H dv]`, optional SiLU gate, output projection."""
  y = rms_norm(o, output.norm.scale).reshape(len(x), -1)
  if output.gate is not None:
    y = y * silu(linear(output.gate, x))
  return linear(output.out, y)
