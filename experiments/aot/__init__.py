"""Compiling for chips that are not here: counts and bytes, never a time on the hardware."""
