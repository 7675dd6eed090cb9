"""Replays a workload on simulated ranks in virtual time, with the project's own schedulers."""
