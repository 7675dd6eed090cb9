"""Every decision about time, as pure functions of what all ranks know."""
