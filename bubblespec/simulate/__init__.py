"""What a workload would take on other hardware: the real rollout code, in virtual time, on recorded
or made-up responses.

May import: rollout, telemetry and what lies below.
"""
