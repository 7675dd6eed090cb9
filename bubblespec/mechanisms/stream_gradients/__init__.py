"""Streamed gradients: idle ranks compute those of finished groups before the update begins.

This is the stream trainer of RollPacker (arXiv 2509.21009).
"""
