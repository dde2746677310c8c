"""The search for the fastest step of reinforcement learning that fits."""
