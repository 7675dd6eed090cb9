"""The ranks of a run: collectives, shared memory, signals, and the life of processes."""
