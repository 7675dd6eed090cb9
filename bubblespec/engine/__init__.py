"""The generation engine: one packed ragged forward, a slot K/V cache, counter-based noise.

It knows nothing of ranks, steps or rewards.
"""
