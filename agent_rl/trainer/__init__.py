"""Training on Megatron-core with the rollout's routing replayed. Start at ``megatron.py``."""
