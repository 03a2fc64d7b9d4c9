"""Everything verl needs to train without a GPU: platform, engines, rollout backend, a tiny model and data."""
