"""The generation engine: one packed ragged forward, a slot K/V cache and counter-based sampling
noise.

May import: records alone of this package; it knows nothing of ranks, steps or rewards.
"""
