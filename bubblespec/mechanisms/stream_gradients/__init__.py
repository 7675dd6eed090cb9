"""Streamed gradients (RollPacker's stream trainer, arXiv 2509.21009): idle ranks compute gradients
of finished groups before the step's update begins."""
