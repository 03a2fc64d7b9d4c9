"""Finds leftover files: parts that no record lists, and temporary files of dead writers.

Finding unlisted parts needs no lock, because of the order: (a) list the parts, (b) list the temporary files, (c) read
the record. A part from (a) that (c) does not list can be deleted unless (b) shows a writer. The commit that wrote the
part is either still in progress at (b) and visible there, or it has ended, and then (c) lists the part or no record
ever will. Object stores do not show writers: a part is deleted along with the record that listed it, or after a day.

Copies of an entry have parts of the same name. A part that a copy has written since (a) is another version of the file,
so it is not deleted. A copy also checks its parts again after publishing its record.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import committed, names
from verl_rollout_skip.store.storage import FileInfo, Storage
from verl_rollout_skip.store.storage.local import is_own_leftover

DAY = 86400.0


def find_leftovers(storage: Storage, folder: str, older_than_s: float = DAY) -> list[FileInfo]:
    """The files that dead writers left in a folder: temporary files, and parts that no record lists."""
    parts = [] if names.parse_folder(folder) is None else unlisted_parts(storage, folder, older_than_s=older_than_s)
    temporary = [file for file in storage.files(folder) if file.name.startswith(names.TEMPORARY)]
    return [*parts, *(file for file in temporary if not is_being_written(file, older_than_s))]


def is_being_written(file: FileInfo, older_than_s: float = DAY) -> bool:
    """Whether this is a temporary file whose writer may be alive.

    On another machine, only the age of the file tells. On this machine, files of a live process are kept for a day;
    after that, another process may have the same pid.
    """
    is_dead = is_own_leftover(file.name) if file.name.startswith(names.TEMPORARY) else True
    allowed = older_than_s if is_dead is None else max(older_than_s, DAY)
    return not is_dead and time.time() - file.changed <= allowed


def unlisted_parts(
    storage: Storage,
    folder: str,
    gen_batch: int | None = None,
    unneeded: Collection[str] = (),
    older_than_s: float = DAY,
) -> list[FileInfo]:
    """Parts of one or all generation batches that no record lists and no commit in progress can list.

    ``unneeded`` are parts of commits that have ended. On a storage that shows writers, they also stay while there is
    one, because it may be copying the same entry.
    """
    found = [(names.parse_part(file.name), file) for file in storage.files(folder)]
    parts = [(number, file) for number, file in found if number is not None and gen_batch in (None, number)]
    if not parts:
        return []
    quiet = storage.shows_writers and not any(is_being_written(file, older_than_s) for file in storage.files(folder))
    step = names.parse_folder(folder) or 0
    listed = {number: committed.listed_parts(storage, RolloutKey(step, number)) for number, _ in parts}
    return [
        file
        for number, file in parts
        if (known := listed[number]) is not None and file.name not in known
        if quiet or (file.name in unneeded and not storage.shows_writers) or time.time() - file.changed > older_than_s
    ]
