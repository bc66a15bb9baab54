"""Benchmarks on this machine: speed, memory, and comparisons with other libraries."""
