"""Short causal convolutions fused with their epilogue (activation and per-head norm)."""
