"""Rows to tables and metrics; no measuring here."""
