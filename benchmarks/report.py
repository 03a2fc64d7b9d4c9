"""Summarizes the measurements: best samples, ratios, goals, and tables."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_rollout_skip.store.sizes import format_size

PACKAGES = ("verl-rollout-skip", "verl", "torch", "tensordict", "pyarrow", "numpy")
JUDGED_TEXT = "zipf"


@dataclass(frozen=True)
class Measure:
    """One row of the comparison. The goal is a factor if ``times_better``, otherwise a fraction of upstream's value."""

    name: str
    title: str
    unit: str
    goal: float
    times_better: bool = True
    sizes: tuple[str, ...] = ("M",)

    def is_judged(self, batch: dict[str, Any]) -> bool:
        """Whether the goal applies to this batch."""
        return batch["size"] in self.sizes and batch["text"] == JUDGED_TEXT

    def ratio(self, batch: dict[str, Any]) -> float:
        ours, upstream = batch["ours"][self.name], batch["upstream"][self.name]
        return float(upstream / ours if self.times_better else ours / upstream)

    def met(self, ratio: float) -> bool:
        return ratio >= self.goal if self.times_better else ratio <= self.goal

    def show(self, ratio: float) -> str:
        return f"{ratio:.1f}×" if self.times_better else f"{100 * ratio:.2f} %"

    def show_goal(self) -> str:
        return f"≥ {self.goal:g}×" if self.times_better else f"≤ {100 * self.goal:g} %"


MEASURES = (
    Measure("bytes", "size on disk", "bytes", 35),
    Measure("dump_seconds", "dump, fsync included", "seconds", 4),
    Measure("fresh_load_seconds", "first load of a process", "seconds", 1, sizes=("S", "M")),
    Measure("fresh_load_read_seconds", "… and every tensor read", "seconds", 1, sizes=("S", "M")),
    Measure("load_seconds", "load, repeated", "seconds", 2.5, sizes=("S", "M")),
    Measure("load_read_seconds", "… and every tensor read", "seconds", 2.5, sizes=("S", "M")),
    Measure("dump_extra_bytes", "extra memory of a dump", "bytes", 18),
    Measure("load_peak_bytes", "extra memory of a load", "bytes", 0, sizes=()),
    Measure("miss_seconds", "RolloutSkip.step: miss", "seconds", 0.01, times_better=False),
    Measure("hit_seconds", "RolloutSkip.step: hit", "seconds", 0.005, times_better=False),
    Measure("first_hit_seconds", "RolloutSkip.step: first hit", "seconds", 0.005, times_better=False),
)


def summary(batch: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Summarize one batch: the best sample of both sides (for loads, the median), the ratios, and all samples."""

    def best(probe: str, field: str) -> float:
        return min(sample[field] for sample in samples[probe])

    def loads(side: str) -> dict[str, float]:
        # How much memory the host has to provide first varies, so the best sample would depend on luck.
        fields = ("seconds", "read_seconds", "repeated_seconds", "repeated_read_seconds", "peak_bytes")
        names = (
            "fresh_load_seconds",
            "fresh_load_read_seconds",
            "load_seconds",
            "load_read_seconds",
            "load_peak_bytes",
        )
        return {
            name: statistics.median(sample[field] for sample in samples[f"{side}_load"])
            for name, field in zip(names, fields, strict=True)
        }

    upstream_loads = loads("upstream")
    ours = {
        "bytes": best("ours_dump", "bytes"),
        "dump_seconds": best("ours_dump", "seconds"),
        "dump_extra_bytes": best("ours_dump", "extra_bytes"),
        "miss_seconds": best("ours_miss", "seconds"),
        "hit_seconds": best("ours_hits", "seconds"),
        "first_hit_seconds": best("ours_hits", "first_seconds"),
        **loads("ours"),
    }
    upstream = {
        "bytes": best("upstream_dump", "bytes"),
        "dump_seconds": best("upstream_dump", "seconds"),
        "dump_extra_bytes": best("upstream_dump", "extra_bytes"),
        # Upstream does not sync, so the thread is blocked only for the write.
        "miss_seconds": best("upstream_dump", "unsynced_seconds"),
        "hit_seconds": upstream_loads["load_seconds"],
        "first_hit_seconds": upstream_loads["load_seconds"],
        **upstream_loads,
    }
    result = {**batch, "ours": ours, "upstream": upstream}
    result["ratios"] = {measure.name: measure.ratio(result) for measure in MEASURES}
    return {**result, "samples": samples}


def goals(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals and the measured ratios, for the batches that they apply to."""
    return [
        {
            "name": measure.name,
            "size": batch["size"],
            "goal": measure.goal,
            "measured": batch["ratios"][measure.name],
            "met": measure.met(batch["ratios"][measure.name]),
        }
        for batch in batches
        for measure in MEASURES
        if measure.is_judged(batch)
    ]


def text(result: dict[str, Any]) -> str:
    """The whole result as text tables."""
    machine = result["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    lines = [
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {format_size(machine['memory_bytes'])}, "
        f"{machine['file_system']}, Python {machine['python']}",
        packages,
        f"best of {result['repeats']} (loads: median), each in a fresh process (uniform text: once); ours also stores "
        "the inputs of the rollout, verl's own does not",
    ]
    for batch in result["batches"]:
        lines += ["", *_batch_lines(batch)]
    lines += ["", *_parts_lines(result["parts"])]
    lines += ["", *_lock_lines(result["interpreter_lock"]), "", *_growth_lines(result["growth"])]
    if result["goals"]:
        missed = [f"{goal['name']} ({goal['size']})" for goal in result["goals"] if not goal["met"]]
        lines += ["", f"goals missed: {', '.join(missed)}" if missed else "all goals met"]
    else:
        lines += ["", f"goals not checked: they apply only to {JUDGED_TEXT} text"]
    return "\n".join(lines)


def _batch_lines(batch: dict[str, Any]) -> list[str]:
    cells = batch["rows"] * (batch["prompt_width"] + batch["response_width"])
    judged = any(measure.is_judged(batch) for measure in MEASURES)
    lines = [
        f"{batch['size']}, {batch['text']} text: {batch['rows']} × ({batch['prompt_width']} + "
        f"{batch['response_width']}), {format_size(batch['raw_bytes'])} of tensors, "
        f"{100 * batch['tokens'] / cells:.0f} % of the cells are tokens"
        + (f"; {format_size(batch['image_bytes'])} of images, each 8 times" if batch["image_bytes"] else ""),
        f"  {'':32}{'ours':>12}{'verl':>12}{'ratio':>12}" + (f"{'goal':>10}" if judged else ""),
    ]
    for measure in MEASURES:
        ratio = batch["ratios"][measure.name]
        ours, upstream = (show(batch[side][measure.name], measure.unit) for side in ("ours", "upstream"))
        line = f"  {measure.title:32}{ours:>12}{upstream:>12}{measure.show(ratio):>12}"
        if measure.is_judged(batch):
            line += f"{measure.show_goal():>10}  {'ok' if measure.met(ratio) else 'missed'}"
        lines.append(line)
    return lines


def _parts_lines(parts: dict[str, Any]) -> list[str]:
    entries = parts["entries"]
    rows = (
        ("dump, fsync included", "seconds", "seconds"),
        ("extra memory of a dump", "extra_bytes", "bytes"),
        ("load, repeated", "load_seconds", "seconds"),
        ("size on disk", "bytes", "bytes"),
    )
    files = [f"{entry['files']} {'part' if entry['files'] == 1 else 'parts'}" for entry in entries]
    return [
        f"entries with several parts, size {parts['size']}, zipf text",
        f"  {'':32}" + "".join(f"{name:>12}" for name in files),
        *(
            f"  {title:32}" + "".join(f"{show(entry[field], unit):>12}" for entry in entries)
            for title, field, unit in rows
        ),
    ]


def _lock_lines(lock: dict[str, Any]) -> list[str]:
    lines = [
        f"in the background, size {lock['size']}, zipf text, while the main thread …",
        f"  {'':32}{'sleeps':>12}{'runs Python':>12}   main thread meanwhile",
    ]
    for part in ("dump", "load"):
        sleeping, busy = lock["sleeping"][part], lock["busy"][part]
        lines.append(
            f"  {part:32}{show(sleeping['seconds'], 'seconds'):>12}{show(busy['seconds'], 'seconds'):>12}"
            f"   at {100 * busy['pace']:.0f} % of its pace, longest stall {show(busy['stall_seconds'], 'seconds')}"
        )
    return lines


def _growth_lines(growth: list[dict[str, Any]]) -> list[str]:
    titles = {
        "keys_seconds": "keys()",
        "contains_seconds": "key in store",
        "commit_seconds": "commit of a tiny batch",
        "counting_commit_seconds": "first commit with max_disk",
    }
    lines = [f"  {'entries in the folder':32}" + "".join(f"{row['entries']:>12,}" for row in growth)]
    for name, title in titles.items():
        lines.append(f"  {title:32}" + "".join(f"{show(row[name], 'seconds'):>12}" for row in growth))
    return ["how the cost grows (medians)", *lines]


def show(value: float, unit: str) -> str:
    """Format a number with a suitable unit."""
    if unit == "bytes":
        return format_size(value)
    if value >= 0.1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def machine(folder: Path) -> dict[str, Any]:
    """A description of the machine."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(_first_value("/proc/meminfo", "MemTotal").split()[0]) * 1024,
        "file_system": _file_system(folder),
        "huge_pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _first_value(path: str, field: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return "unknown"


def _file_system(folder: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    over = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(over)[1] if over else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
