"""Training: one compiled step, a loop around it, checkpoints."""
