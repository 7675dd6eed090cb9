"""Who does what, and when: ranks tell each other how far they are while a rollout runs."""
