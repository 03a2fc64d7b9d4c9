"""verl's V0 trainers: `RayPPOTrainer` and what is derived from it."""
