"""Every mixer once more, from its formula alone: NumPy, float64, a loop over tokens.

A file is named after the kind of its mixer. `plain(mixer, x)` takes the weights of a mixer of one
row x `[L D]` and gives y `[L D]`; constants of the formula are written there as numbers, never
read from the settings. `MUTATIONS` are changes of the mixer's source that must be noticed.

Nothing here may import deltanet_jax: what is shared are these few functions.
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
  """Each channel's last few inputs, weighted; nothing was before the first token."""
  if conv is None:
    return x
  kernel = array(conv.kernel)
  y = np.zeros_like(x)
  for t in range(len(x)):
    for back in range(min(len(kernel), t + 1)):
      y[t] += kernel[len(kernel) - 1 - back] * x[t - back]
  return y if conv.bias is None else y + array(conv.bias)


def convolved(qkv, x):
  """q, k and v; where they are convolved, silu of that."""
  for into, conv in ((qkv.q, qkv.q_conv), (qkv.k, qkv.k_conv), (qkv.v, qkv.v_conv)):
    y = linear(into, x)
    yield y if conv is None else silu(short_conv(conv, y))


def heads(x, H):
  """[L d] to [L H d/H]."""
  return x.reshape(len(x), H, -1)


def rope(x):
  """Turns the pairs (i, i + d/2) of x `[L H d]` by the angle t 10000^(-2i/d)."""
  half = x.shape[-1] // 2
  y = np.zeros_like(x)
  for t in range(len(x)):
    angle = t * 10000.0 ** (-2 * np.arange(half) / (2 * half))
    a, b = x[t, :, :half], x[t, :, half:]
    y[t, :, :half] = a * np.cos(angle) - b * np.sin(angle)
    y[t, :, half:] = a * np.sin(angle) + b * np.cos(angle)
  return y


def hyena_filter(layer, length, taps):
  """h `[taps filters]`: a network of three layers of sines in the place s, under a window."""
  filters = layer.last.shape[1]
  h = np.zeros((taps, filters))
  for s in range(min(taps, length)):
    t = s / (length - 1)
    bands = (layer.kernels[0].shape[0] - 1) // 2
    turns = np.exp(-1j * 2 * np.pi * s / length * np.linspace(1e-4, bands - 1, bands))
    x = np.concatenate([[t], turns.real, turns.imag])
    for kernel, bias in zip(layer.kernels, layer.biases):
      x = np.sin(array(layer.frequency) * (x @ array(kernel) + array(bias)))
    rates = np.linspace(np.log(100) / 1.5, np.log(100) / 0.3, filters)
    h[s] = (x @ array(layer.last)) * np.exp(-rates * t)
  return h


def head_output(output, o, x):
  """Norm of each head, gate where there is one, output projection; o `[L H dv]`."""
  y = rms_norm(o, output.norm.scale).reshape(len(x), -1)
  if output.gate is not None:
    y = y * silu(linear(output.gate, x))
  return linear(output.out, y)
