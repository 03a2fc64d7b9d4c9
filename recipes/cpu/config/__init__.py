"""Hydra configuration of the CPU default, found as pkg://recipes.cpu.config."""
