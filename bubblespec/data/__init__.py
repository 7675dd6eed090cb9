"""Prompts, and which of them make up a step."""
