"""Short convolutions with the activation and the norm of heads that follow them, in one pass."""
