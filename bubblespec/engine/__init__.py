"""The generation engine: one packed ragged forward, a slot K/V cache and counter-based sampling
noise.

It knows nothing of ranks, steps or rewards.
"""
