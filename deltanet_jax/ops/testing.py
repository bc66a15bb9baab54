"""Input generators, error measures and tolerances for tests, benchmarks and device checks.

Spec and `random_inputs` generate inputs of the delta rule, `ill_conditioned_inputs` edge cases that
amplify rounding. `with_gradients` evaluates an operator and its VJP, `rel_rms` measures errors.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

# Tolerances: relative RMS error against the float64 definition, (outputs, gradients). They depend
# on the dtype, never on the machine.
REL_RMS = {
  "float64": (1e-11, 1e-11),
  "float32": (2e-6, 2e-6),
  "bfloat16": (8e-3, 1.2e-2),
}
# The same for `ill_conditioned_inputs`.
ILL_CONDITIONED_REL_RMS = {"float64": 1e-11, "float32": 1e-5}


def rel_rms(x, ref) -> float:
  """Return the relative root mean square error; 0 if both are zero."""
  x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
  if x.shape != ref.shape:
    raise ValueError(f"x has shape {x.shape}, expected the shape of ref, {ref.shape}.")
  error = np.sqrt(np.mean((x - ref) ** 2))
  return float(error and error / np.sqrt(np.mean(ref**2)))


def cast(inputs: dict, dtype: str) -> dict[str, jax.Array]:
  """Cast floating inputs to `dtype`; a state S0 stays at least float32, integers unchanged."""

  def one(name, x):
    if not jnp.issubdtype(np.asarray(x).dtype, jnp.floating):
      return jnp.asarray(x)
    upcast = name == "S0" and jnp.finfo(dtype).bits < 32
    return jnp.asarray(x, "float32" if upcast else dtype)

  return {name: one(name, x) for name, x in inputs.items()}


def with_gradients(f: Callable, names: tuple[str, ...] = ("o", "S")) -> Callable:
  """Return a jitted (inputs, cotangents) -> outputs and gradients of f(**inputs).

  The result is a dict of the outputs by `names`, and d<name> of each floating input. Outputs are
  returned too: with gradients alone the compiler could drop half of the forward pass.
  """

  @jax.jit
  def run(inputs, cotangents):
    floating = {n: x for n, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {n: x for n, x in inputs.items() if n not in floating}
    outputs, pull = jax.vjp(lambda x: f(**x, **rest), floating)
    (grads,) = pull(jax.tree.map(lambda d, y: d.astype(y.dtype), cotangents, outputs))
    return dict(zip(names, outputs)) | {f"d{name}": x for name, x in grads.items()}

  return run


def random_cotangents(f: Callable, inputs: dict, seed: int = 1) -> tuple[np.ndarray, ...]:
  """Draw normally distributed cotangents of the outputs of f(**inputs)."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda x: f(**x), inputs)
  return tuple(rng.standard_normal(shape.shape) for shape in shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """Shapes and options of delta rule inputs; `Hv`, `dv` default to `H`, `dk`."""

  B: int = 1
  L: int
  H: int = 4
  Hv: int | None = None
  dk: int = 64
  dv: int | None = None
  gate: Literal["none", "scalar", "vector"] = "none"
  packed: bool = False
  max_beta: float = 1.0

  @property
  def v_shape(self):
    return self.B, self.L, self.Hv or self.H, self.dv or self.dk


# The paper's speed figure; it fixes the width H dk and B L = 16384, here B = 1 and H = 4.
SPEED = {
  f"d{d}_L{L}": Spec(L=L, H=4, dk=d) for d in (64, 128, 256) for L in (512, 1024, 2048, 4096, 8192)
}


def random_inputs(spec: Spec, seed: int = 0, dtype="float64") -> dict[str, np.ndarray]:
  """Draw keyword arguments of `delta_rule`: unit keys and queries, log decays in (-20, -0.001).

  Packed sequences have segments of 1 token up to several chunks; ids recur in later segments.
  """
  rng = np.random.default_rng(seed)
  B, L, Hv, dv = spec.v_shape
  normal = lambda *shape: rng.standard_normal(shape)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  inputs = dict(
    q=unit(normal(B, L, spec.H, spec.dk)),
    k=unit(normal(B, L, spec.H, spec.dk)),
    v=normal(B, L, Hv, dv),
    beta=spec.max_beta / (1 + np.exp(-normal(B, L, Hv))),
    S0=normal(B, Hv, spec.dk, dv),
  )
  if spec.gate != "none":
    shape = (B, L, Hv) if spec.gate == "scalar" else (B, L, Hv, spec.dk)
    inputs["g"] = -np.exp(rng.uniform(np.log(1e-3), np.log(20), shape))
  inputs = {name: x.astype(dtype) for name, x in inputs.items()}
  if spec.packed:
    # Random boundaries, plus single-token segments in the middle of the sequence.
    starts = rng.random((B, L)) < 5 / L
    starts[:, L // 2 : L // 2 + 3] = True
    inputs["segment_ids"] = (np.cumsum(starts, axis=1) % 3).astype("int32")
  return inputs


ILL_CONDITIONED = (
  "identical",
  "identical_beta_2",
  "alternating",
  "period_8",
  "nearly_identical",
  "zero_keys",
  "beta_0",
  "huge_values",
)


def ill_conditioned_inputs(kind: str, L: int = 4096, d: int = 32) -> dict[str, np.ndarray]:
  """Return inputs that amplify rounding errors; `kind` is one of ILL_CONDITIONED."""
  if kind not in ILL_CONDITIONED:
    raise ValueError(f"kind is {kind!r}, expected one of {ILL_CONDITIONED}.")
  rng = np.random.default_rng(0)
  inputs = random_inputs(Spec(L=L, H=1, dk=d))
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  few = unit(rng.standard_normal((8, d)))
  period = {"identical": 1, "identical_beta_2": 1, "alternating": 2, "period_8": 8}.get(kind)
  if period:
    inputs["k"][0, :, 0] = few[np.arange(L) % period]
    inputs["beta"][:] = 2.0 if kind == "identical_beta_2" else 1.0
  match kind:
    case "nearly_identical":
      inputs["k"][0, :, 0] = unit(few[0] + 1e-3 * rng.standard_normal((L, d)))
      inputs["beta"][:] = 1.0
    case "zero_keys":
      inputs["k"][:] = 0.0
    case "beta_0":
      inputs["beta"][:] = 0.0
    case "huge_values":
      inputs["v"] *= 1e4
  return inputs
