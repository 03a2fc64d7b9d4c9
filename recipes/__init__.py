"""Ready-to-run trainings; each folder holds its entry point and its configuration."""
