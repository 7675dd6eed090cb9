"""Uses of idle time, and who gets it."""
