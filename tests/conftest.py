import gc
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compilation dominates test time; without LLVM's optimizer and the fusion emitters it is several
# times faster. `make test-slow` tests with XLA's default options (XLA_FLAGS set but empty).
os.environ.setdefault(
  "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax
import pytest

# References are float64; implicit rank and dtype promotion are errors.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def limit_compiled_programs():
  """Clear JAX's caches when a process holds many compiled programs.

  XLA maps memory for each, and beyond 65,530 maps (Linux's default limit) the process crashes.
  """
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
    jax.clear_caches()
    gc.collect()
