"""Commands: `deltanet train ...` or `python -m experiments.train ...`."""

from deltanet_jax._extras import require

require("experiments", "absl", "flax", "grain", "ml_collections", "optax", "orbax", "tqdm")
