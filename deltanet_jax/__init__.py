"""DeltaNet-style linear transformers in JAX."""
