"""Finds leftover files: parts that no record lists, and temporary files of dead writers.

Finding unlisted parts needs no lock if the order is right: (a) list the parts, (b) list the temporary files, (c) read
the record. A part found in (a) but not listed in (c) can be deleted unless (b) shows a writer. This is safe because the
commit that wrote the part is either still in progress at (b) and visible there, or has ended. If it has ended, then (c)
lists the part or no record ever will. Object stores do not show writers. There, a part is deleted along with the record
that listed it, or after a day.

Copies of an entry have parts with the same names. If a copy has written a part again since (a), the version of the file
has changed, so it is not deleted. A copy also checks its parts again after publishing its record.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import committed, names
from verl_rollout_skip.store.storage import FileInfo, Storage
from verl_rollout_skip.store.storage.local import writer_has_exited

DAY = 86400.0


def find_leftovers(storage: Storage, folder: str, older_than_s: float = DAY) -> list[FileInfo]:
    """The files that dead writers left in a folder: temporary files, and parts that no record lists."""
    parts = [] if names.parse_folder(folder) is None else unlisted_parts(storage, folder, older_than_s=older_than_s)
    temporary = [file for file in storage.files(folder) if file.name.startswith(names.TEMPORARY)]
    return [*parts, *(file for file in temporary if not is_being_written(file, older_than_s))]


def is_being_written(file: FileInfo, older_than_s: float = DAY) -> bool:
    """Whether this is a temporary file whose writer may be alive.

    If the writer ran on another machine, only the age of the file can tell. A file of a live process on this machine is
    kept for a day; after that, another process may have the same pid.
    """
    is_dead = writer_has_exited(file.name) if file.name.startswith(names.TEMPORARY) else True
    max_age_s = older_than_s if is_dead is None else max(older_than_s, DAY)
    return not is_dead and time.time() - file.changed <= max_age_s


def unlisted_parts(
    storage: Storage,
    folder: str,
    gen_batch: int | None = None,
    obsolete: Collection[str] = (),
    older_than_s: float = DAY,
) -> list[FileInfo]:
    """The parts of one or all generation batches that no record lists and that no commit in progress can list.

    ``obsolete`` parts belong to commits that have ended. Even these are kept while a storage shows a writer, because it
    may be copying the same entry.
    """
    numbered = [(names.parse_part(file.name), file) for file in storage.files(folder)]
    parts = [(number, file) for number, file in numbered if number is not None and gen_batch in (None, number)]
    if not parts:
        return []
    shows_writers = storage.shows_writers
    no_writers = shows_writers and not any(is_being_written(file, older_than_s) for file in storage.files(folder))
    step = names.parse_folder(folder) or 0
    listed = {number: committed.listed_parts(storage, RolloutKey(step, number)) for number, _ in parts}
    return [
        file
        for number, file in parts
        if (listed_names := listed[number]) is not None and file.name not in listed_names
        if no_writers or (file.name in obsolete and not shows_writers) or time.time() - file.changed > older_than_s
    ]
