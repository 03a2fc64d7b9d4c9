"""``rollout-skip verify``: everything that can be checked about recorded rollouts, and a list of what is wrong."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress

from verl_rollout_skip.cli.folders import Variant
from verl_rollout_skip.cli.text import safe
from verl_rollout_skip.errors import RolloutSkipError
from verl_rollout_skip.manifest import read_recordings
from verl_rollout_skip.store import names

_NO_MANIFEST = "There is no manifest, so nobody knows from which settings the rollouts come, and no training uses them."


def collect(variants: list[Variant], quiet: bool) -> dict[str, Any]:
    """Check all entries and manifests. ``quiet`` shows no progress bar; it never shows where nobody looks."""
    problems: list[dict[str, Any]] = []
    checked = size = 0
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        for variant in variants:
            store = variant.store
            keys = store.keys()
            by_training = False
            for key in progress.track(keys, description=variant.name):
                try:
                    record = store.verify(key)
                    size += record.bytes
                    by_training = by_training or "training_hash" in record.info
                except (RolloutSkipError, OSError) as error:
                    problems.append(_problem(variant, str(error), key.step, key.gen_batch))
                checked += 1
            problems += [_problem(variant, str(error)) for error in read_recordings(variant.storage)[1]]
            if variant.manifest_error is not None:
                problems.append(_problem(variant, variant.manifest_error))
            elif variant.manifest is None and by_training:
                problems.append(_problem(variant, _NO_MANIFEST))
    aside = [place for variant in variants for place in _set_aside(variant)]
    result = {"ok": not problems, "variants": len(variants), "entries": checked, "bytes": size}
    return {**result, "problems": problems, "set_aside": aside}


def render(console: Console, result: dict[str, Any]) -> None:
    """The same for people."""
    for problem in result["problems"]:
        console.print(safe(f"{problem['path']}: {problem['error']}", "red"), soft_wrap=True)
    for place in result["set_aside"]:
        console.print(safe(f"set aside earlier: {place}", "yellow"), soft_wrap=True)
    text = f"{result['entries']} entries in {result['variants']} variants checked, "
    bad = len(result["problems"])
    console.print(safe(text + (f"{bad} problems" if bad else "all fine"), "red" if bad else "green"))


def _problem(variant: Variant, error: str, step: int | None = None, gen_batch: int | None = None) -> dict[str, Any]:
    return {"path": variant.path, "step": step, "gen_batch": gen_batch, "error": error}


def _set_aside(variant: Variant) -> list[str]:
    storage = variant.storage
    folders = [folder for folder in storage.folders() if names.parse_folder(folder) is not None]
    return sorted(
        storage.where(folder, name)
        for folder in folders
        for name in storage.names(folder)
        if ".parquet." in name and name.endswith(".corrupt")
    )
