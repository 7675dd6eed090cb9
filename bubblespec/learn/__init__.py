"""From samples to new weights: advantages, losses, micro-batches, the optimizer."""
