"""Named input shapes of the delta rule and random inputs for them: tests, benchmarks and tuning."""

import dataclasses
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """Sizes of one problem; `Hv`, `dv` default to `H`, `dk`."""

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


# The paper's speed figure: width H dk fixed and B L = 16384 there, B = 1 and H = 4 here.
SPEED = {
  f"d{d}_L{L}": Spec(L=L, H=4, dk=d) for d in (64, 128, 256) for L in (512, 1024, 2048, 4096, 8192)
}


def random_inputs(spec: Spec, seed: int = 0, dtype="float64") -> dict[str, np.ndarray]:
  """Keyword arguments of `delta_rule`: unit keys and queries, gates from -20 to -0.001 per step.

  Packed rows hold documents of 1 token up to several chunks; ids come back in later documents.
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
    # Boundaries at random plus documents of one token each in the middle of the row.
    starts = rng.random((B, L)) < 5 / L
    starts[:, L // 2 : L // 2 + 3] = True
    inputs["segment_ids"] = (np.cumsum(starts, axis=1) % 3).astype("int32")
  return inputs


UGLY = (
  "identical",
  "identical_beta_2",
  "alternating",
  "period_8",
  "nearly_identical",
  "zero_keys",
  "beta_0",
  "huge_values",
)


def ugly_inputs(kind: str, L: int = 4096, d: int = 32) -> dict[str, np.ndarray]:
  """Inputs that amplify rounding, by a name of UGLY: keys that repeat, vanish, huge values."""
  if kind not in UGLY:
    raise ValueError(f"kind is {kind!r}, expected one of {UGLY}.")
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
