"""verl's V0 trainers: ``RayPPOTrainer`` and trainers derived from it."""
