"""Rollouts on disk: codec, commit, background writer, store. Knows nothing of trainers."""
