"""What is left in a folder that nobody needs: files of writers that died. ``commit.py`` says why it may be deleted."""

from __future__ import annotations

import time
from collections.abc import Collection

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import committed, names
from verl_rollout_skip.store.storage import FileInfo, Storage
from verl_rollout_skip.store.storage.local import is_own_leftover

DAY = 86400.0


def find_leftovers(storage: Storage, folder: str, older_than_s: float = DAY) -> list[FileInfo]:
    """What writers that died left in a folder: temporary files, and parts that no record lists."""
    parts = [] if names.parse_folder(folder) is None else unlisted_parts(storage, folder, older_than_s=older_than_s)
    temporary = [file for file in storage.files(folder) if file.name.startswith(names.TEMPORARY)]
    return [*parts, *(file for file in temporary if not is_being_written(file, older_than_s))]


def is_being_written(file: FileInfo, older_than_s: float = DAY) -> bool:
    """Whether it is a temporary file whose writer may be alive.

    Of a process elsewhere only the age tells. A living one here keeps its files for a day; after that, another process
    may have its number.
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
    """Parts of a generation batch, or of all, that no record lists and no commit under way can list.

    The order of the calls matters. ``unneeded`` are parts of commits that are over. Where writers show, they stay while
    one does: it may be copying the same entry, and copies have the names of the original.
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
