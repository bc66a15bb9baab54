"""Causal softmax attention kernels for TPU and GPU, with derivatives of any order.

The functions import Pallas when they are called: `attention.checks` is usable without it.
"""


def attention_tpu(q, k, v, segments=None, *, window=None, interpret=False):
  """Apply causal attention on TPU; see `attention.pallas_tpu.attention.attention_tpu`."""
  from pallas_kernels.attention.pallas_tpu import attention

  return attention.attention_tpu(q, k, v, segments, window=window, interpret=interpret)


def attention_gpu(q, k, v, segments=None, *, window=None, interpret=False):
  """Apply causal attention on GPU; see `attention.pallas_gpu.attention.attention_gpu`."""
  from pallas_kernels.attention.pallas_gpu import attention

  return attention.attention_gpu(q, k, v, segments, window=window, interpret=interpret)
