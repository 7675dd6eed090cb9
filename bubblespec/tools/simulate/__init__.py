"""What a workload would take on other hardware: the real rollout code, in virtual time, on recorded
or made-up responses."""
