"""Rollouts on disk: codec, commit, background writer, store. Knows nothing about trainers."""
