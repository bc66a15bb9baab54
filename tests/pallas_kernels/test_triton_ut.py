"""The Triton UT transform in Triton's interpreter (NumPy on the CPU) against float64.

Triton reads TRITON_INTERPRET when it is imported, so the kernel runs in a separate process.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from deltanet_jax.ops.testing import (
  ILL_CONDITIONED_REL_RMS,
  REL_RMS,
  Spec,
  ill_conditioned_inputs,
  random_inputs,
  rel_rms,
)
from tests.support.delta_rule import reference, value_and_grads
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.aot

SPEC = Spec(B=2, L=64, H=1, Hv=2, dk=16, dv=32)


@pytest.fixture(scope="module")
def interpreter():
  """A process with Triton in interpret mode: `submit` runs the functions below there."""
  with pytest.MonkeyPatch.context() as patch:
    for name in ("TRITON_INTERPRET", "JAX_ENABLE_X64"):
      patch.setenv(name, "1")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, _interpret) as pool:
      pool.submit(int).result()  # started while the variables are set
      yield pool


def _interpret():
  """Make `jax_triton.triton_call` run its kernel in this process, one program after another."""
  import jax_triton
  import triton.language as tl
  from triton.runtime import interpreter

  from pallas_kernels.delta_rule.ut import triton as ut_triton

  class Pointer:
    """What the interpreter needs of an array in host memory."""

    def __init__(self, array):
      self.dtype, self.data_ptr = getattr(tl, array.dtype.name), lambda: array.ctypes.data

  # The originals copy torch tensors from a device and back.
  interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
  interpreter.GridExecutor._restore_args_dev = lambda *_: None

  def dot(self, a, b, total, *_):
    # bfloat16 is stored as its bits, which the interpreter's own matmul reads as integers.
    a, b = (x.data.view(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b))
    return interpreter.TensorHandle(a @ b + total.data, total.dtype.scalar)

  interpreter.InterpreterBuilder.create_dot = dot
  # The interpreter patches functions of Triton while it runs, and XLA calls back from two threads.
  one_at_a_time = threading.Lock()

  def triton_call(*args, kernel, out_shape, grid, compute_capability, **options):
    def run(*args):
      arrays = [np.ascontiguousarray(x) for x in args]
      outputs = [np.full(x.shape, np.nan, x.dtype) for x in out_shape]
      with one_at_a_time:
        kernel[grid](*map(Pointer, arrays + outputs), **options)
      return outputs

    return jax.pure_callback(run, out_shape, *args)

  jax_triton.triton_call = triton_call
  ut_triton.require_platform = lambda x, *_: x


def transform(inputs, **options):
  """Return X, W, U of every chunk from the kernel."""
  from pallas_kernels.delta_rule.ut import triton

  return [np.asarray(x, np.float64) for x in triton.ut_transform(**inputs, **options)]


def exact_transform(k, v, beta, g, segments, chunk):
  """Return the same by definition in float64, one chunk and head after another."""
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  N = L // chunk
  X, W, U = (np.zeros((N, B, Hv, chunk, d)) for d in (chunk, dk, dv))
  for n, b, h in np.ndindex(N, B, Hv):
    rows = slice(n * chunk, (n + 1) * chunk)
    K, V, gates = k[b, rows, h * H // Hv], v[b, rows, h], beta[b, rows, h, None]
    own = segments[b, rows]
    decay = np.cumsum(g[b, rows, h])
    A = np.tril(gates * (K @ K.T) * np.exp(np.minimum(decay[:, None] - decay, 0)), -1)
    A *= own[:, None] == own
    carried = own == segments[b, max(n * chunk - 1, 0)]
    X[n, b, h] = np.linalg.inv(np.eye(chunk) + A)
    W[n, b, h] = X[n, b, h] @ (gates * (np.exp(decay) * carried)[:, None] * K)
    U[n, b, h] = X[n, b, h] @ (gates * V)
  return X, W, U


PLAIN, FULL = {}, dict(gate="scalar", packed=True)


@pytest.mark.parametrize(
  "change,dtype,precision",
  [
    (PLAIN, "float32", "bf16x6"),
    (FULL, "float32", "bf16x6"),
    (FULL, "float32", "substitution"),
    (FULL, "bfloat16", "bf16x3"),
  ],
)
def test_transform_equals_its_definition(interpreter, change, dtype, precision):
  x = random_inputs(dataclasses.replace(SPEC, **change))
  names = [name for name in ("k", "v", "beta", "g") if name in x]
  inputs = {name: x[name].astype(dtype if name in "kv" else "float32") for name in names}
  wide = {name: y.astype(np.float64) for name, y in inputs.items()}
  if "segment_ids" in x:
    change = np.diff(x["segment_ids"], axis=1, prepend=x["segment_ids"][:, :1]) != 0
    inputs["segments"] = wide["segments"] = np.cumsum(change, axis=1, dtype=np.int32)
  wide.setdefault("g", np.zeros_like(x["beta"]))
  wide.setdefault("segments", np.zeros(x["beta"].shape[:2], np.int32))
  want = exact_transform(**wide, chunk=32)
  call = interpreter.submit(transform, inputs, chunk=32, inverse_precision=precision)
  X, W, U = call.result()
  for got, exact in zip((X.sum(3), W, U), want):
    assert rel_rms(got, exact) <= REL_RMS[dtype][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", [dict(L=40), dict(L=33, **FULL)])
def test_triton_equals_recurrence(interpreter, change, dtype):
  """o, S and all gradients of implementation="triton"."""
  inputs, want = reference(dataclasses.replace(SPEC, **change), dtype, scale=0.3)
  options = dict(implementation="triton", chunk=32, scale=0.3)
  got = interpreter.submit(value_and_grads, inputs, dtype, **options).result()
  assert_close(got, want, dtype)


@pytest.mark.parametrize("kind", ["identical_beta_2", "nearly_identical"])
def test_ill_conditioned_inputs(interpreter, kind):
  """Repeated keys over 1024 tokens. All kinds over 4096 tokens pass too, in six minutes."""
  inputs = {name: x.astype(np.float32) for name, x in ill_conditioned_inputs(kind, L=1024).items()}
  want = value_and_grads(inputs, "float64", implementation="recurrent")
  run = interpreter.submit(value_and_grads, inputs, "float32", implementation="triton")
  errors = {name: rel_rms(x, want[name]) for name, x in run.result().items()}
  assert all(error <= ILL_CONDITIONED_REL_RMS["float32"] for error in errors.values()), errors
