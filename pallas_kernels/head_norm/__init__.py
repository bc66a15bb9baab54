"""Fused gated per-head RMSNorm."""
