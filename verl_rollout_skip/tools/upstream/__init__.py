"""Reads dumps of verl's own rollout skip (0.6 to 0.9) without executing any code in them."""
