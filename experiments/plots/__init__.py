"""Rows to tables and metrics; no measuring here."""

from deltanet_jax._extras import require

require("experiments.plots", "matplotlib")
