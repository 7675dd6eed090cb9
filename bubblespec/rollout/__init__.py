"""One step's samples: placement on ranks, the loop of forwards and ticks, scoring, gathering.

May import: idle, rewards, speculate, data, engine, ranks and what lies below.
"""
