"""Tables and figures from records; nothing is measured here."""

from deltanet_jax._extras import require

require("experiments.plots", "matplotlib")
