"""The exceptions that this package raises. Each message says what happened, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_rollout_skip.key import RolloutKey


class RolloutSkipError(Exception):
    """The base class of all errors in this package."""


class ConfigError(RolloutSkipError, ValueError):
    """A setting is wrong. Names the key, the value and what is allowed."""


class ManifestError(RolloutSkipError):
    """A manifest is missing, damaged, edited, or in another version of the format."""


class LedgerError(RolloutSkipError):
    """A training's ledger cannot be read: it is damaged, too large, or in a later version of the format."""


class NoLedgerError(LedgerError):
    """A training has no ledger."""


class MismatchError(RolloutSkipError):
    """Recorded rollouts depend on different settings or prompts. Says what differs."""


class ShadowError(RolloutSkipError):
    """In mode shadow, too few generated rows are identical to the recorded ones. Names the step, the ratio and rows."""


class UnsupportedBatchError(RolloutSkipError, TypeError):
    """The batch contains a value that cannot be stored exactly. Names the key and the type."""


class UnsupportedTrainerError(RolloutSkipError, TypeError):
    """A trainer or verl version that is not supported. Names the supported ones."""


class InertError(RolloutSkipError):
    """A training step completed without a rollout step, so nothing was recorded or replayed."""


class StoreError(RolloutSkipError):
    """A problem with a store's folder or with an entry in it."""


class EntryNotFoundError(StoreError, LookupError):
    """No entry is committed under this key."""


class EntryExistsError(StoreError):
    """A different rollout is already committed under this key."""


class UnreadableEntryError(StoreError):
    """An entry exists but cannot be trusted; it can be set aside and recorded again."""


class CorruptEntryError(UnreadableEntryError):
    """An entry's bytes are not the committed bytes, or were never written by this package."""


class NewerFormatError(UnreadableEntryError):
    """An entry was written by a newer version of this package."""


class OldFormatError(UnreadableEntryError):
    """An entry was written by an earlier version of this package, in a format that is no longer read."""


class EntryTooLargeError(StoreError):
    """Loading the entry would need more memory than allowed."""


class UnsafePathError(StoreError):
    """A path could lead outside the store's folder: it contains a symbolic link, or is not a regular file."""


class QueueError(RolloutSkipError):
    """A rollout cannot be read from TransferQueue."""


class TaskError(RolloutSkipError):
    """A Ray task that reads or writes a slice of a rollout failed, even after retries."""


class DumpError(StoreError):
    """One or more rollouts could not be written. Training can continue; the rollouts are not on disk.

    ``failures`` lists the failed background dumps: each key with its error.
    """

    failures: tuple[tuple[RolloutKey, BaseException], ...] = ()

    @classmethod
    def of(cls, failures: Sequence[tuple[RolloutKey, BaseException]]) -> DumpError:
        """The error for dumps that failed in the background."""
        lines = "\n".join(f"- {error}" if str(key) in str(error) else f"- {key}: {error}" for key, error in failures)
        error = cls(f"{len(failures)} rollout(s) were not written:\n{lines}")
        error.failures = tuple(failures)
        return error


class ChangedBatchError(DumpError):
    """A batch was modified in place between ``put`` and its write, so it is no longer what was generated."""

    def __init__(self, names: Sequence[str]) -> None:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        super().__init__(
            f"{shown} changed in place while the dump was waiting, so it is no longer what was generated and is not "
            "recorded. Training is not affected; the step has to be generated again. From now on each step is copied "
            "in full before it is written, which takes longer. To record every step, modify a clone of the tensor in "
            "the trainer, or set background=False to write each step before the training continues."
        )


class DiskLimitError(DumpError):
    """Writing the rollout would make the store's folder larger than ``max_disk``."""
