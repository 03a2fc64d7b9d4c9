"""Moves rollouts between TransferQueue and the store."""
