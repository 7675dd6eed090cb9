"""The generation engine: one packed ragged forward, a K/V cache and counter-based noise.

It has no notion of ranks, steps or rewards.
"""
