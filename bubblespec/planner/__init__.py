"""Every decision about time, as pure functions of what all ranks know: what forwards cost, how long
responses get, which rank generates them, and what is worth drafting."""
