"""Storages for the files of one folder: the contract, local folders, and fsspec URLs."""

from verl_rollout_skip.store.storage.contract import HERE, FileInfo, Staged, Storage
from verl_rollout_skip.store.storage.locations import is_url, join, open_storage

__all__ = ["HERE", "FileInfo", "Staged", "Storage", "is_url", "join", "open_storage"]
