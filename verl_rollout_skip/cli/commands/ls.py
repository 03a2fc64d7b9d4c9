"""``rollout-skip ls``: lists runs, how their variants differ, and the steps of a single variant."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option
from verl_rollout_skip.cli.output import MISSING, format_number, format_seconds, format_time, print_line, print_table
from verl_rollout_skip.cli.selection import Selection, Variant, select
from verl_rollout_skip.config.skip_config import describe_steps
from verl_rollout_skip.fingerprint.fingerprint import difference
from verl_rollout_skip.store.reader import EntryRecord, Unreadable
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.tools.stats import whole_mean

_DATE_LENGTH = len("2026-01-31")


@click.command(
    cls=Command,
    examples="rollout-skip ls /data/dumps\n"
    "rollout-skip ls /data/dumps/RUN/VARIANT --steps 1-10\n"
    "rollout-skip ls /data/dumps --json",
)
@path_argument()
@steps_option()
def command(path: str, steps: str | None) -> Result:
    """List runs, their variants and how these differ. For a single variant, list its steps too."""
    selection = select(path, steps)
    selection.check_not_empty()
    runs: dict[str, dict[str, Any]] = {}
    first: dict[str, Variant] = {}
    for variant in selection.variants:
        one = runs.setdefault(variant.run_path, {"run": variant.run, "path": variant.run_path, "variants": []})
        one["variants"].append(_variant(selection, variant, first.get(variant.run_path)))
        if variant.manifest is not None:
            first.setdefault(variant.run_path, variant)
    return Result({"runs": list(runs.values())}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    for run in data["runs"]:
        print_line(console, run["run"], "bold")
        headers = ("variant", "recorded", "steps", "entries", "rows", "size", "score", "length", "layout")
        rows = [_row(found) for found in run["variants"]]
        print_table(console, headers, rows, left=("variant", "recorded", "steps"), shorten=("steps", "variant"))
        for found in run["variants"]:
            _render_notes(console, found)
        console.print()
    variants = [variant for run in data["runs"] for variant in run["variants"]]
    if len(variants) == 1:
        _render_entries(console, variants[0])


def _row(found: dict[str, Any]) -> list[Any]:
    numbers = [found["entries"], found["rows"], format_size(found["bytes"])]
    means = [format_number(found["mean_score"], 3), format_number(found["mean_response_length"], 1)]
    recorded = format_time(found["created_at"])[:_DATE_LENGTH]
    return [found["variant"], recorded, found["steps"], *numbers, *means, found["layout"]]


def _variant(selection: Selection, variant: Variant, first: Variant | None) -> dict[str, Any]:
    manifest = variant.manifest
    records: list[EntryRecord] = []
    unreadable: list[Unreadable] = []
    for found in variant.entries.records(selection.includes):
        if isinstance(found, Unreadable):
            unreadable.append(found)
        else:
            records.append(found)
    differs = training = None
    if first is not None and first.manifest is not None and manifest is not None:
        differs = difference(first.manifest.fingerprint, manifest.fingerprint)
        training = difference(first.manifest.training, manifest.training)
    return {
        "variant": variant.name,
        "path": variant.path,
        "created_at": None if manifest is None else manifest.created_at,
        "manifest_error": variant.manifest_error,
        "layout": (None if variant.manifest is None else variant.manifest.devices) or MISSING,
        "steps": describe_steps({record.key.step for record in records}) or "none",
        "rows": sum(record.rows for record in records),
        "bytes": sum(record.bytes for record in records),
        "mean_score": whole_mean((record.mean_score, record.rows) for record in records),
        "mean_response_length": whole_mean((record.mean_response_length, record.rows) for record in records),
        "compared_with": None if differs is None or first is None else first.name,
        "differs": differs,
        "training_differs": training,
        "trainings": 0 if manifest is None else len(manifest.trainings),
        "entries": len(records),
        "unreadable": [
            {"step": bad.key.step, "gen_batch": bad.key.gen_batch, "error": bad.error} for bad in unreadable
        ],
        "records": [_entry(record) for record in records],
    }


def _entry(record: EntryRecord) -> dict[str, Any]:
    return {
        "step": record.key.step,
        "gen_batch": record.key.gen_batch,
        "rows": record.rows,
        "bytes": record.bytes,
        "mean_score": record.mean_score,
        "mean_prompt_length": record.mean_prompt_length,
        "mean_response_length": record.mean_response_length,
        "generate_s": record.info.get("generate_s"),
        "created_at": record.created_at,
    }


def _render_notes(console: Console, found: dict[str, Any]) -> None:
    if found["manifest_error"]:
        print_line(console, f"{found['variant']}: {found['manifest_error']}", "red")
    for bad in found["unreadable"]:
        print_line(console, f"{found['variant']}: {bad['error']}", "red")
    for key, title in (("differs", "settings differ"), ("training_differs", "training differs")):
        if found[key]:
            print_line(console, f"{found['variant']}: {title} from {found['compared_with']}:")
            for changed in found[key]:
                print_line(console, f"  {changed}")


def _render_entries(console: Console, found: dict[str, Any]) -> None:
    headers = ("step", "gen batch", "rows", "size", "score", "prompt", "response", "generated in")
    rows = [
        (
            *(entry[key] for key in ("step", "gen_batch", "rows")),
            format_size(entry["bytes"]),
            format_number(entry["mean_score"], 3),
            format_number(entry["mean_prompt_length"], 1),
            format_number(entry["mean_response_length"], 1),
            format_seconds(entry["generate_s"]),
        )
        for entry in found["records"]
    ]
    print_table(console, headers, rows)
