"""Episodes: environments, the token ids of their observations, and the processes that run them.

Worker processes import this folder, so it imports nothing heavy here.
"""
