"""The decision for one rollout step: load it, or generate and record it. Knows modes and keys, not verl's trainers."""
