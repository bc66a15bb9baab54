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
    # Boundaries at random plus a run of documents of one token each in the middle of the row.
    starts = rng.random((B, L)) < 5 / L
    starts[:, L // 2 : L // 2 + 3] = True
    inputs["segment_ids"] = (np.cumsum(starts, axis=1) % 3).astype("int32")
  return inputs
