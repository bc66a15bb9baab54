"""Results to figures; no measuring here."""
