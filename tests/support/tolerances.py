"""Holding errors to the tolerances of their dtype."""

from deltanet_jax.ops.testing import REL_RMS, rel_rms


def assert_close(got: dict, want: dict, dtype: str):
  """Every value and gradient (names that start with d) within its dtype's tolerance."""
  assert got.keys() == want.keys()
  errors = {name: rel_rms(got[name], want[name]) for name in want}
  limits = {name: REL_RMS[dtype][name.startswith("d")] for name in want}
  bad = {name: e for name, e in errors.items() if not e <= limits[name]}
  assert not bad, f"{bad} over {limits}"
