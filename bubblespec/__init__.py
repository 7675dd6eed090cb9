"""bubblespec: a synchronous RL trainer for language models that fits on one node."""
