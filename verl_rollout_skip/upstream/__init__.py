"""Dumps of verl's own rollout skip (0.6 to 0.9), read without running anything that is in them."""
