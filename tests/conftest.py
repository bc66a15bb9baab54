import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

# float64 is the yardstick; mixing ranks or dtypes by accident is an error.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
