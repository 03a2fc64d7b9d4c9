"""Ready-to-run trainings; each folder has its entry point and configuration."""
