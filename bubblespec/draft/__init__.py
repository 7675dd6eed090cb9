"""Speculation: where draft tokens come from, how many of them pay, and what came of them. It
changes time, never a token.

May import: ranks and records.
"""
