import gc
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiling: a fraction of it without LLVM's optimiser and the newer
# emitters. `make test-slow` keeps XLA's defaults (XLA_FLAGS set but empty), so the code that users
# run is tested too.
os.environ.setdefault(
  "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax
import pytest

# float64 is the yardstick; mixing ranks or dtypes by accident is an error.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
  """Lets go of compiled programs before they are too many.

  XLA maps memory for each, and Linux allows a process 65,530 maps; beyond them it crashes.
  """
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
    jax.clear_caches()
    gc.collect()
