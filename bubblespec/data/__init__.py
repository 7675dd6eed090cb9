"""Prompts, and which of them make up a step.

May import: records and errors.
"""
