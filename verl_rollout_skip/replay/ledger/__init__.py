"""Ledgers: what a training computed, step by step, and how two of them are compared."""
