"""``rollout-skip ls``: runs, their variants and what differs between them, and the steps of a single variant."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from verl_rollout_skip.cli.folders import Variant
from verl_rollout_skip.cli.text import number, safe
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.fingerprint import difference
from verl_rollout_skip.rollout import describe_steps
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.entry import EntryRecord


def collect(variants: list[Variant]) -> dict[str, Any]:
    """What is recorded, as JSON has it."""
    runs: dict[str, dict[str, Any]] = {}
    first: dict[str, Variant] = {}
    for variant in variants:
        folder = variant.path.rsplit("/", 1)[0]
        run = runs.setdefault(folder, {"run": variant.run, "path": folder, "variants": []})
        run["variants"].append(_variant(variant, first.get(folder)))
        if variant.manifest is not None:
            first.setdefault(folder, variant)
    return {"runs": list(runs.values())}


def render(console: Console, result: dict[str, Any]) -> None:
    """The same for people."""
    variants = [variant for run in result["runs"] for variant in run["variants"]]
    for run in result["runs"]:
        console.print(safe(run["run"], "bold"))
        table = Table("variant", "recorded", "steps", "entries", "rows", "size", "mean score", "mean length", "layout")
        for found in run["variants"]:
            numbers = [found["entries"], found["rows"], format_size(found["bytes"])]
            means = [number(found["mean_score"], 3), number(found["mean_response_length"], 1)]
            cells = [found["variant"], found["created_at"] or "–", found["steps"], *numbers, *means, found["layout"]]
            table.add_row(*(safe(cell) for cell in cells))
        console.print(table)
        for found in run["variants"]:
            _render_notes(console, found)
    if len(variants) == 1:
        _render_entries(console, variants[0])


def _variant(variant: Variant, first: Variant | None) -> dict[str, Any]:
    manifest = variant.manifest
    entries, unreadable = [], []
    store = variant.store
    for key in store:
        try:
            entries.append(_entry(store.record(key)))
        except StoreError as error:
            unreadable.append({"step": key.step, "gen_batch": key.gen_batch, "error": str(error)})
    differs = training = None
    if first is not None and first.manifest is not None and manifest is not None:
        differs = difference(first.manifest.fingerprint, manifest.fingerprint)
        training = difference(first.manifest.training, manifest.training)
    rows = sum(entry["rows"] for entry in entries)
    return {
        "variant": variant.name,
        "path": variant.path,
        "created_at": None if manifest is None else manifest.created_at,
        "manifest_error": variant.manifest_error,
        "layout": _layout(variant),
        "steps": describe_steps({entry["step"] for entry in entries}) or "none",
        "rows": rows,
        "bytes": sum(entry["bytes"] for entry in entries),
        "mean_score": _mean(entries, "mean_score"),
        "mean_response_length": _mean(entries, "mean_response_length"),
        "compared_with": None if differs is None or first is None else first.name,
        "differs": differs,
        "training_differs": training,
        "recordings": 0 if manifest is None else len(manifest.recordings),
        "entries": len(entries),
        "unreadable": unreadable,
        "records": entries,
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


def _mean(entries: list[dict[str, Any]], key: str) -> float | None:
    known = [entry for entry in entries if entry[key] is not None and entry["rows"]]
    rows = sum(entry["rows"] for entry in known)
    return sum(entry[key] * entry["rows"] for entry in known) / rows if rows else None


def _layout(variant: Variant) -> str:
    layout = {} if variant.manifest is None else variant.manifest.gpu_layout
    nodes, devices = layout.get("nnodes"), layout.get("n_gpus_per_node")
    return "–" if nodes is None or devices is None else f"{nodes} × {devices}"


def _render_notes(console: Console, found: dict[str, Any]) -> None:
    if found["manifest_error"]:
        console.print(safe(f"{found['variant']}: {found['manifest_error']}", "red"), soft_wrap=True)
    for bad in found["unreadable"]:
        console.print(safe(f"{found['variant']}: {bad['error']}", "red"), soft_wrap=True)
    for key, title in (("differs", "other settings than"), ("training_differs", "another training than")):
        if found[key]:
            console.print(safe(f"{found['variant']} has {title} {found['compared_with']}:"))
            for line in found[key]:
                console.print(safe(f"  {line}"), soft_wrap=True)


def _render_entries(console: Console, found: dict[str, Any]) -> None:
    table = Table("step", "gen batch", "rows", "size", "mean score", "mean prompt", "mean response", "generated in")
    for entry in found["records"]:
        seconds = entry["generate_s"]
        table.add_row(
            *(str(entry[key]) for key in ("step", "gen_batch", "rows")),
            format_size(entry["bytes"]),
            number(entry["mean_score"], 3),
            number(entry["mean_prompt_length"], 1),
            number(entry["mean_response_length"], 1),
            "–" if seconds is None else f"{seconds:.1f} s",
        )
    console.print(table)
