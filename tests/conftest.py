import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiling: a fraction of it without LLVM's optimiser and the newer
# emitters. `make test-slow` keeps XLA's defaults (XLA_FLAGS set but empty), so the code that users
# run is tested too.
os.environ.setdefault(
  "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax

# float64 is the yardstick; mixing ranks or dtypes by accident is an error.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
