"""The ranks of a run: collectives, the progress board of a rollout, signals, and the life of
processes.

May import: errors alone of this package.
"""
