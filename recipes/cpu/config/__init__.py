"""Hydra configuration for training on CPU, found as pkg://recipes.cpu.config."""
