"""Ready-made workloads: scripts that prepare a policy and a task mixture for the trainer.

May import: data.
"""
