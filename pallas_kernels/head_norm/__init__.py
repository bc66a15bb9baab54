"""The norm of each head with its scale, and the gate of an output, in one pass."""
