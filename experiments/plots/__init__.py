"""Tables and figures from records; nothing is measured here."""
