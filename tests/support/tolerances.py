"""Errors and the tolerances they are held to, which belong to a dtype and never to a machine."""

from deltanet_jax.ops.numerics import rel_rms

# Relative RMS against the float64 recurrence: (o and S, gradients).
REL_RMS = {
  "float64": (1e-11, 1e-11),
  "float32": (2e-6, 2e-6),
  "bfloat16": (8e-3, 1.2e-2),
}
# The same for repeated keys and other inputs that amplify rounding.
UGLY_REL_RMS = {"float64": 1e-11, "float32": 1e-5}


def assert_close(got: dict, want: dict, dtype: str):
  """Every value and gradient (names that start with d) within its dtype's tolerance."""
  assert got.keys() == want.keys()
  errors = {name: rel_rms(got[name], want[name]) for name in want}
  limits = {name: REL_RMS[dtype][name.startswith("d")] for name in want}
  bad = {name: e for name, e in errors.items() if not e <= limits[name]}
  assert not bad, f"{bad} over {limits}"
