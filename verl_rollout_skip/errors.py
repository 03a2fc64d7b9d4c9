"""Every error this package raises on purpose. Each message says what happened, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_rollout_skip.key import RolloutKey


class RolloutSkipError(Exception):
    """Base of all errors of this package."""


class ConfigError(RolloutSkipError, ValueError):
    """A setting is wrong. Names the key, the value and what is allowed."""


class ManifestError(RolloutSkipError):
    """A manifest is missing, damaged, edited, or of a later version."""


class MismatchError(RolloutSkipError):
    """Recorded rollouts depend on other settings or other prompts than today's. Says what differs."""


class UnsupportedBatchError(RolloutSkipError, TypeError):
    """The batch holds something that cannot be stored exactly. Names the key and the type."""


class UnsupportedTrainerError(RolloutSkipError, TypeError):
    """A trainer, or a version of verl, whose rollout step is not known here. Names those that are."""


class InertError(RolloutSkipError):
    """A training step went by without passing through the rollout step, so nothing was recorded or replayed."""


class StoreError(RolloutSkipError):
    """Something is wrong with a run folder or with an entry in it."""


class EntryNotFoundError(StoreError, LookupError):
    """No entry is committed under this key."""


class EntryExistsError(StoreError):
    """Another rollout is already committed under this key, and it is a different one."""


class UnreadableEntryError(StoreError):
    """An entry is there but cannot be trusted; it can be set aside and recorded again."""


class CorruptEntryError(UnreadableEntryError):
    """An entry's bytes are not the bytes that were committed, or were never ours."""


class NewerFormatError(UnreadableEntryError):
    """An entry was written by a later version of this package."""


class EntryTooLargeError(StoreError):
    """Loading the entry would take more memory than allowed."""


class UnsafePathError(StoreError):
    """A path would leave the run folder: a symbolic link, or something that is no regular file."""


class QueueError(RolloutSkipError):
    """TransferQueue does not give out what a rollout consists of."""


class DumpError(StoreError):
    """One or more rollouts could not be written. Training can go on; they are not on disk.

    ``failures`` lists what failed in the background: each key with its own error.
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
    """A batch was changed in place between ``put`` and its write, so that it is no longer what was generated."""

    def __init__(self, names: Sequence[str]) -> None:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        super().__init__(
            f"{shown} changed in place while the dump waited, and only what was generated may be recorded. Training is "
            "not affected; the step will have to be generated again. Later steps are copied whole before they are "
            "written, which takes longer. To record every step, change a clone of the tensor in the trainer, or write "
            "with background=False, before the training goes on."
        )


class DiskLimitError(DumpError):
    """Writing the rollout would make the run folder larger than ``max_disk``."""
