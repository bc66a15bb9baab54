"""Rows to tables and figures; no measuring here."""
