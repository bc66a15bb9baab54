"""Rotary position embeddings (RoPE)."""
