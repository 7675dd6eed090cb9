"""Decisions about time, as pure functions of what has been measured and of what all ranks know."""
