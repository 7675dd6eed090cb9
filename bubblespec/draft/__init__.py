"""Sources of draft tokens, and their outcome. They change time, never a token."""
