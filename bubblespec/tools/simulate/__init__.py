"""Rollouts in virtual time: the real rollout code, on recorded or synthetic responses."""
