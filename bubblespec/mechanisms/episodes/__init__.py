"""Environments of episodes: their forms, the token ids of what they say, and the processes in which
they run. Workers import this folder, so it imports nothing heavy here.

May import: ranks, config and what lies below.
"""
