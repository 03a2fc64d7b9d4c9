"""Rollouts on disk: the codec, commits, the background writer, and the store. Knows nothing about trainers."""
