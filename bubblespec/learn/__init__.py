"""From samples to new weights: advantages, losses, micro-batches, the optimizer.

May import: engine, ranks, config and what lies below.
"""
