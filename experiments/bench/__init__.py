"""Commands that time something on this machine."""
