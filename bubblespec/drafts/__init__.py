"""Draft sources: they propose tokens for the engine to verify. A proposal changes how long generation takes, never a token."""
