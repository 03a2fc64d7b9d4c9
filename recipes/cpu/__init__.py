"""What verl needs to train on a machine without a GPU: platform, engines, rollout backend, a tiny model and data."""
