"""Where draft tokens come from, and what came of them. It changes time, never a token."""
