"""One step's rollout: placement on ranks, the loop of forwards and ticks, scoring, gathering."""
