"""``rollout-skip verify``: checks recorded rollouts completely and lists every problem."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option
from verl_rollout_skip.cli.output import pluralize, print_line, progress
from verl_rollout_skip.cli.selection import Variant, select
from verl_rollout_skip.errors import RolloutSkipError
from verl_rollout_skip.runs.manifest import CONFIG_HASH, explain_foreign
from verl_rollout_skip.runs.paths import variant_name
from verl_rollout_skip.runs.trainings import read_trainings
from verl_rollout_skip.tools.prune import find_set_aside


@click.command(
    cls=Command,
    examples="rollout-skip verify /data/dumps\nrollout-skip verify /data/dumps/RUN/VARIANT --steps 1-10 --json",
)
@path_argument()
@steps_option()
def command(path: str, steps: str | None) -> Result:
    """Read and check everything: records, digests and page checksums, whether each entry can be decoded, and manifests.

    The exit code is 1 if there is any problem.
    """
    selection = select(path, steps)
    selection.check_not_empty()
    problems: list[dict[str, Any]] = []
    checked = size = 0
    with progress() as bar:
        for variant in selection.variants:
            store = variant.store
            hashes: set[str | None] = set()
            for key in bar.track(selection.keys(variant), description=variant.name):
                try:
                    record = store.verify(key)
                    size += record.bytes
                    hashes |= {record.info.get(CONFIG_HASH)} if "training_hash" in record.info else set()
                    foreign = variant.manifest and explain_foreign(record.info, variant.manifest)
                    if foreign:
                        problems.append(_problem(variant, f"{key} {foreign}", key.step, key.gen_batch))
                except (RolloutSkipError, OSError) as error:
                    problems.append(_problem(variant, str(error), key.step, key.gen_batch))
                checked += 1
            problems += [_problem(variant, str(error)) for error in read_trainings(variant.storage)[1]]
            if variant.manifest_error is not None:
                problems.append(_problem(variant, variant.manifest_error))
            elif variant.manifest is None and hashes:
                problems.append(_problem(variant, _explain_missing_manifest(variant, hashes)))
    aside = [where for variant in selection.variants for where in list_set_aside(variant)]
    data = {"ok": not problems, "variants": len(selection.variants), "entries": checked, "bytes": size}
    return Result({**data, "problems": problems, "set_aside": aside}, render, 1 if problems else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    for problem in data["problems"]:
        print_line(console, f"{problem['path']}: {problem['error']}", "red")
    for path in data["set_aside"]:
        print_line(console, f"set aside earlier: {path}", "yellow")
    entries = pluralize(data["entries"], "entry", "entries")
    bad = len(data["problems"])
    found = pluralize(bad, "problem") if bad else "no problems"
    print_line(
        console, f"{entries} in {pluralize(data['variants'], 'variant')} checked, {found}", "red" if bad else "green"
    )


def list_set_aside(variant: Variant) -> list[str]:
    """The records of entries that a training set aside because it could not read them."""
    found = find_set_aside(variant.storage)
    return sorted(variant.storage.where(file.folder, file.name) for file in found if ".json." in file.name)


def _explain_missing_manifest(variant: Variant, hashes: set[str | None]) -> str:
    """Explain how to restore a missing manifest. ``hashes`` are the settings hashes in the records."""
    text = "manifest.json is missing, so no training uses these rollouts. Restore it from a copy"
    known = [found for found in hashes if found is not None]
    if len(hashes) != 1 or not known:
        return f"{text}, or record again: the records do not prove which settings they were made with."
    name = variant_name(known[0])
    back = "" if name == variant.name else f"rename the folder back to {name} and "
    return (
        f"{text}; or {back}start the training again with the recorded settings and rollout_skip.mode=cache: it "
        "writes the manifest again, because every record names the settings it was made with."
    )


def _problem(variant: Variant, error: str, step: int | None = None, gen_batch: int | None = None) -> dict[str, Any]:
    return {"path": variant.path, "step": step, "gen_batch": gen_batch, "error": error}
