"""``rollout-skip copy``: recordings to another folder or object store, checked by digest, resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, number_option, path_argument, steps_option
from verl_rollout_skip.cli.folders import Place, Variant, find_place
from verl_rollout_skip.cli.text import line, progress, table
from verl_rollout_skip.errors import ConfigError, ManifestError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.reader import EntryRecord, StoreReader
from verl_rollout_skip.store.storage.local import LocalStorage, free_bytes
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.transfer import Copied, Outcome, copy_description, copy_entries

if TYPE_CHECKING:
    from rich.progress import Progress

_BAD = (Outcome.CONFLICT, Outcome.DAMAGED)


@click.command(
    cls=Command,
    examples="rollout-skip copy /data/dumps/RUN /backup/RUN\n"
    "rollout-skip copy /data/dumps s3://bucket/dumps --read-back\n"
    "rollout-skip copy /data/dumps/RUN/VARIANT /data/first --steps 1",
)
@path_argument("src")
@path_argument("dst", "where to: a folder or a URL; made if it is not there")
@steps_option()
@click.option("--read-back", is_flag=True, help="read each entry again at DST and check its digest")
@number_option("--jobs", "entries at a time (default: 4)", 4)
def command(src: str, dst: str, steps: str | None, read_back: bool, jobs: int) -> Result:
    """Copy a dump_dir, a run or a variant to another folder or object store, or from one: entries, manifests,
    trainings, tokenizers and pins.

    DST then holds what SRC holds, at the same places below it. Each entry is checked by its digest and appears whole or
    not at all. Run the same command again to go on after an interruption, or to copy what was recorded since. Nothing
    is overwritten: another rollout under the same key is kept and reported.

    The exit code is 1 if entries or manifests are damaged or in conflict; the others are copied.
    """
    place = find_place(src, steps)
    place.check_chosen()
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}; give 1 or more.")
    work = [(variant, target, place.keys(variant)) for variant, target in _destinations(place, dst)]
    _check_space(dst, work)
    with progress() as bar:
        variants = [_copy(bar, jobs, read_back, *item) for item in work]
    failed = any(variant["problems"] for variant in variants)
    return Result({"source": src, "destination": dst, "variants": variants}, render, 1 if failed else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    rows = [
        (
            variant["name"],
            variant["copied"],
            variant["present"],
            variant["not_copied"],
            format_size(variant["bytes"]),
        )
        for variant in data["variants"]
    ]
    headers = ("variant", "copied", "there already", "not copied", "size")
    table(console, headers, rows, left=("variant",), shorten=("variant",))
    for variant in data["variants"]:
        for problem in variant["problems"]:
            line(console, f"{problem['outcome']}: {problem['error']}", "red")
    line(console, f"in {data['destination']}")


def _copy(
    bar: Progress, jobs: int, read_back: bool, variant: Variant, target: str, keys: list[RolloutKey]
) -> dict[str, Any]:
    task = bar.add_task(variant.name, total=len(keys))
    storage = open_storage(target)
    try:
        copy_description(variant.storage, storage)
    except ManifestError as error:
        bar.advance(task, len(keys))
        return {**_plain(variant, target, Copied()), **_refused(keys, error)}
    copied = copy_entries(
        variant.storage,
        storage,
        keys,
        jobs=jobs,
        read_back=read_back,
        done=lambda entry: bar.advance(task),
    )
    return _plain(variant, target, copied)


def _destinations(place: Place, dst: str) -> list[tuple[Variant, str]]:
    """Each variant with the place below DST that it has below SRC."""
    target = open_storage(dst).where().rstrip("/")
    if f"{target}/".startswith(f"{place.root}/") or f"{place.root}/".startswith(f"{target}/"):
        raise ConfigError(f"{dst} and {place.path} lie within one another: give a destination beside the source.")
    return [(variant, target + variant.path.removeprefix(place.root)) for variant in place.variants]


def _check_space(dst: str, work: list[tuple[Variant, str, list[RolloutKey]]]) -> None:
    """Say before the copy begins that there is no room for it."""
    storage = open_storage(dst)
    if not isinstance(storage, LocalStorage):
        return
    needed = 0
    for variant, target, keys in work:
        missing = set(keys) - set(StoreReader.at(target))
        records = variant.entries.records(missing.__contains__)
        needed += sum(record.bytes for record in records if isinstance(record, EntryRecord))
    free = free_bytes(storage.root)
    if needed > free:
        raise StoreError(
            f"{format_size(needed)} are to be copied and {format_size(free)} are free in {storage.root}. Make room, "
            "choose another place, or copy fewer steps with --steps."
        )


def _plain(variant: Variant, target: str, copied: Copied) -> dict[str, Any]:
    problems = [
        {"step": e.key.step, "gen_batch": e.key.gen_batch, "outcome": e.outcome.value, "error": e.error}
        for e in copied.entries
        if e.outcome in _BAD
    ]
    return {
        "name": variant.name,
        "source": variant.path,
        "destination": target,
        "copied": copied.count(Outcome.COPIED),
        "present": copied.count(Outcome.PRESENT),
        "not_copied": len(problems),
        "bytes": sum(entry.bytes for entry in copied.entries if entry.outcome is Outcome.COPIED),
        "problems": problems,
    }


def _refused(keys: list[RolloutKey], error: ManifestError) -> dict[str, Any]:
    """Entries without the manifest that says what they were made from would be of no use, so none is copied."""
    problem = {"step": None, "gen_batch": None, "outcome": "manifest", "error": str(error)}
    return {"not_copied": len(keys), "problems": [problem]}
