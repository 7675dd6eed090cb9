"""One step's samples: placement on ranks, the loop of forwards and ticks, scoring, gathering."""
