"""``rollout-skip copy``: copies recordings between folders and object stores. Checked by digest, resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, number_option, path_argument, steps_option
from verl_rollout_skip.cli.output import pluralize, print_line, print_table, progress
from verl_rollout_skip.cli.selection import Selection, Variant, select
from verl_rollout_skip.errors import ConfigError, ManifestError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.reader import EntryRecord, StoreReader
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.store.storage.local import LocalStorage, free_bytes
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.tools.copy import CopiedEntry, Outcome, copy_columns, copy_entries, copy_metadata

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
@path_argument("dst", "the destination: a folder or a URL; created if it does not exist")
@steps_option()
@click.option("--read-back", is_flag=True, help="read each entry back from DST and check its digest")
@number_option("--jobs", "number of entries to copy in parallel (default: 4)", 4)
def command(src: str, dst: str, steps: str | None, read_back: bool, jobs: int) -> Result:
    """Copy a dump_dir, a run or a variant between folders and object stores, with entries, manifests, trainings,
    training columns, tokenizers and pins.

    DST gets the same folder structure as SRC. The digest of each entry is checked, and each entry is copied completely
    or not at all. Run the same command again to continue after an interruption or to copy steps recorded
    since then.
    Nothing is overwritten: if DST has a different rollout under the same key, it is kept and reported.

    The exit code is 1 if entries or manifests are damaged or in conflict. The others are copied.
    """
    selection = select(src, steps)
    selection.check_not_empty()
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}, but must be at least 1.")
    work = [(variant, target, selection.keys(variant)) for variant, target in _destinations(selection, dst)]
    _check_space(dst, work)
    with progress() as bar:
        variants = [_copy(bar, selection, jobs, read_back, *item) for item in work]
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
    headers = ("variant", "copied", "already there", "not copied", "size")
    print_table(console, headers, rows, left=("variant",), shorten=("variant",))
    columns = sum(variant["columns"] for variant in data["variants"])
    if columns:
        print_line(console, f"and the training columns of {pluralize(columns, 'update')}")
    for variant in data["variants"]:
        for problem in variant["problems"]:
            print_line(console, f"{problem['outcome']}: {problem['error']}", "red")
    print_line(console, f"in {data['destination']}")


def _copy(
    bar: Progress,
    selection: Selection,
    jobs: int,
    read_back: bool,
    variant: Variant,
    target: str,
    keys: list[RolloutKey],
) -> dict[str, Any]:
    task = bar.add_task(variant.name, total=len(keys))
    storage = open_storage(target)
    try:
        copy_metadata(variant.storage, storage)
    except ManifestError as error:
        bar.advance(task, len(keys))
        return {**_to_json(variant, target, [], []), **_refused(keys, error)}
    copied = []
    for entry in copy_entries(variant.storage, storage, keys, jobs=jobs, read_back=read_back):
        copied.append(entry)
        bar.advance(task)
    columns = list(copy_columns(variant.path, target, selection.includes_step, jobs=jobs, read_back=read_back))
    return _to_json(variant, target, sorted(copied, key=lambda entry: entry.key), columns)


def _destinations(selection: Selection, dst: str) -> list[tuple[Variant, str]]:
    """Pair each variant with its path below DST, which is the same as below SRC."""
    target = open_storage(dst).where().rstrip("/")
    if f"{target}/".startswith(f"{selection.root}/") or f"{selection.root}/".startswith(f"{target}/"):
        raise ConfigError(f"One of {dst} and {selection.path} contains the other. Choose a destination outside SRC.")
    return [(variant, target + variant.path.removeprefix(selection.root)) for variant in selection.variants]


def _check_space(dst: str, work: list[tuple[Variant, str, list[RolloutKey]]]) -> None:
    """Raise before anything is copied if it does not fit on the disk."""
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
            f"The copy needs {format_size(needed)}, but only {format_size(free)} is free in {storage.root}. Free some "
            "space, choose another destination, or copy fewer steps with --steps."
        )


def _to_json(variant: Variant, target: str, copied: list[CopiedEntry], columns: list[CopiedEntry]) -> dict[str, Any]:
    problems = [
        {"step": e.key.step, "gen_batch": e.key.gen_batch, "outcome": e.outcome.value, "error": e.error}
        for e in [*copied, *columns]
        if e.outcome in _BAD
    ]
    return {
        "name": variant.name,
        "source": variant.path,
        "destination": target,
        "copied": sum(entry.outcome is Outcome.COPIED for entry in copied),
        "present": sum(entry.outcome is Outcome.PRESENT for entry in copied),
        "not_copied": len(problems),
        "columns": sum(entry.outcome is Outcome.COPIED for entry in columns),
        "bytes": sum(entry.bytes for entry in [*copied, *columns] if entry.outcome is Outcome.COPIED),
        "problems": problems,
    }


def _refused(keys: list[RolloutKey], error: ManifestError) -> dict[str, Any]:
    """No entry is copied, because entries are useless without the manifest that says how they were generated."""
    problem = {"step": None, "gen_batch": None, "outcome": "manifest", "error": str(error)}
    return {"not_copied": len(keys), "problems": [problem]}
