"""Assertions on relative RMS errors, with one tolerance per dtype."""

from deltanet_jax.ops.testing import REL_RMS, rel_rms


def assert_close(got: dict, want: dict, dtype: str):
  """Assert that every value and gradient (names that start with d) is within tolerance."""
  assert got.keys() == want.keys()
  errors = {name: rel_rms(got[name], want[name]) for name in want}
  limits = {name: REL_RMS[dtype][name.startswith("d")] for name in want}
  bad = {name: e for name, e in errors.items() if not e <= limits[name]}
  assert not bad, f"{bad} over {limits}"
