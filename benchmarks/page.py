"""Writes the measurements of the store into docs/benchmarks.md, between two comments (``--page``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import MEASURES, show
from verl_rollout_skip.store.sizes import format_size

BEGIN, END = "<!-- begin: written by make bench-store -->\n", "<!-- end -->\n"


def write_page(page: Path, result: dict[str, Any]) -> None:
    """Replace the results of an earlier run on the page."""
    text = page.read_text()
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"{page} has no lines {BEGIN.strip()!r} and {END.strip()!r} to write between.")
    page.write_text(f"{before}{BEGIN}\n{markdown(result)}\n{END}{after}")


def markdown(result: dict[str, Any]) -> str:
    """The tables of a run, and the conditions of the measurement."""
    machine = result["machine"]
    where = (
        f"Measured on {machine['date']} with verl {machine['packages']['verl']} on {machine['cores']} cores of "
        f"{machine['cpu']}, {format_size(machine['memory_bytes'])} of memory, {machine['file_system']}."
    )
    shown = [batch for batch in result["batches"] if batch["size"] in ("M", "images") and batch["text"] == "zipf"]
    parts = [where, *(_table(batch) for batch in shown), _parts(result["parts"]), _rest(result)]
    return "\n\n".join(parts) + "\n"


def _table(batch: dict[str, Any]) -> str:
    images = f", {format_size(batch['image_bytes'])} of images (one per prompt, copied 8 times)"
    title = (
        f"**{batch['rows']} trajectories**, {batch['prompt_width']} + {batch['response_width']} tokens wide: "
        f"{format_size(batch['raw_bytes'])} of tensors{images if batch['image_bytes'] else ''}"
    )
    lines = ["| | this package | verl | ratio |", "|---|---|---|---|"]
    for measure in MEASURES:
        ours, upstream = (show(batch[side][measure.name], measure.unit) for side in ("ours", "upstream"))
        lines.append(f"| {measure.title} | {ours} | {upstream} | {measure.show(batch['ratios'][measure.name])} |")
    return "\n".join([title, "", *lines])


def _parts(parts: dict[str, Any]) -> str:
    lines = [
        f"**Entries with one part and with several parts** (size {parts['size']})",
        "",
        "| parts | dump | extra memory | load | size |",
        "|---|---|---|---|---|",
    ]
    for entry in parts["entries"]:
        lines.append(
            f"| {entry['files']} | {show(entry['seconds'], 'seconds')} | {show(entry['extra_bytes'], 'bytes')} "
            f"| {show(entry['load_seconds'], 'seconds')} | {show(entry['bytes'], 'bytes')} |"
        )
    return "\n".join(lines)


def _rest(result: dict[str, Any]) -> str:
    lock, growth = result["interpreter_lock"], result["growth"]
    sleeping, busy = (lock[name]["dump"] for name in ("sleeping", "busy"))
    few, many = growth[0], growth[-1]
    seconds = {name: [show(row[name], "seconds") for row in (few, many)] for name in few if name.endswith("_seconds")}
    return (
        f"While the training thread is busy running Python code, a background dump (size {lock['size']}) takes "
        f"{show(busy['seconds'], 'seconds')} instead of {show(sleeping['seconds'], 'seconds')}, and the training "
        f"thread runs at {100 * busy['pace']:.0f} % of its normal speed.\n\n"
        f"With {few['entries']:,} and with {many['entries']:,} entries in a folder, looking up a key takes "
        f"{' and '.join(seconds['contains_seconds'])}, a commit {' and '.join(seconds['commit_seconds'])}; listing all "
        f"keys takes {show(many['keys_seconds'] / many['entries'], 'seconds')} per entry."
    )
