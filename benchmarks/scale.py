"""Measures what recording and loading V1 samples of up to several gigabytes cost the driver and the training thread.

Each configuration runs in its own process (``scale_training.py``) on a real TransferQueue. Results go to
benchmarks/results/scale.json, the picture and the tables to docs/scale.md, the figures of batch M to README.md. Run it
with ``make bench-scale``; it needs about 20 GB of memory and an idle machine. ``--minutes`` limits its time: the next
run continues with the configurations that are left.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.scale_training import Scale
from verl_rollout_skip.store.sizes import format_size

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "scale.json"
PAGE = ROOT / "docs" / "scale.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "scale.svg"
IMAGE = "![Seconds on the training thread and memory of the driver, by size of the sample](images/scale.svg)"
BEGIN, END = "<!-- begin: written by make bench-scale -->\n", "<!-- end -->\n"
BYTES_PER_TOKEN = 52
M = Scale(rows=2048, length=2000)
LARGE_GB, LARGE_NODES = 44, 16
console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the smallest sample, and nothing is written")
    parser.add_argument("--minutes", type=float, default=60, help="start no further measurement after this time (60)")
    parser.add_argument("--write", action="store_true", help="measure nothing, only write the page from the results")
    options = parser.parse_args()
    if options.quick:
        for tasks in ("on", "off"):
            show(run(sized(0.1, tasks)))
        return
    result = earlier_results(complete=options.write)
    left = 0 if options.write else measure(result, options.minutes)
    write(result)
    console.print(f"written to {RESULTS}, {PAGE}, {README} and {PICTURE}")
    if left:
        console.print(f"{left} configurations are left: run make bench-scale again to continue")


def planned() -> dict[str, list[Scale]]:
    """The configurations of each table, in gigabytes per sample or units, the most important ones first.

    The driver path is left out where it would not fit into the memory of the machine.
    """
    return {
        "units": [with_units(units, tasks) for units in (8, 32, 1) for tasks in ("on", "off")],
        "sizes": [sized(size, "on") for size in (0.1, 4, 1, 2, 6, 0.5)],
        "driver": [sized(size, "off") for size in (0.1, 4, 1, 2, 0.5)],
        "at_once": [sized(1, "on", at_once=count) for count in (2, 1, 4)],
    }


def earlier_results(complete: bool) -> dict[str, Any]:
    """The results of an earlier run that can be continued or, if ``complete``, only written; otherwise none."""
    if RESULTS.exists():
        result: dict[str, Any] = json.loads(RESULTS.read_text())
        if complete or len(result["runs"]) < len(configurations()):
            return result
    return {"machine": report.machine(ROOT), "runs": []}


def configurations() -> list[Scale]:
    return list(dict.fromkeys(scale for group in planned().values() for scale in group))


def measure(result: dict[str, Any], minutes: float) -> int:
    """Measure the configurations that have no result yet; return how many are left when the time is over."""
    started = time.monotonic()
    waiting = [scale for scale in configurations() if find(result, scale) is None]
    total = len(configurations())
    while waiting and time.monotonic() - started < minutes * 60:
        console.print(f"measurement {total - len(waiting) + 1} of {total}")
        result["runs"].append(run(waiting.pop(0)))
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return len(waiting)


def find(result: dict[str, Any], scale: Scale) -> dict[str, Any] | None:
    wanted = asdict(scale)
    return next((found for found in result["runs"] if wanted.items() <= found.items()), None)


def found_of(result: dict[str, Any], group: str, by: str) -> list[dict[str, Any]]:
    """The results of one table in the order of one of their values."""
    found = [one for scale in planned()[group] if (one := find(result, scale)) is not None]
    return sorted(found, key=lambda one: (one[by], one["tasks"] == "off"))


def write(result: dict[str, Any]) -> None:
    """Write the picture, and the tables into the page."""
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(result))
    fill(PAGE, f"\n{markdown(result)}\n\n")
    fill(README, f"{sentence(result)}\n")


def fill(file: Path, text: str) -> None:
    """Replace what stands between the two markers of a file."""
    before, _, rest = file.read_text().partition(BEGIN)
    file.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}")


def sentence(result: dict[str, Any]) -> str:
    """The figures of batch M for the README."""
    found = find(result, M)
    if found is None:
        return ""
    dump, hit = typical(found, "record"), typical(found, "replay")
    return (
        f"With V1 and a batch of {M.rows} trajectories of {M.length} tokens ({format_size(found['sample_bytes'])}), a "
        f"recorded step\nholds up the training for {dump['blocked']:.2f} s and a hit for {hit['blocked']:.2f} s "
        "([V1 samples at scale](docs/scale.md))."
    )


def with_units(units: int, tasks: str) -> Scale:
    return Scale(M.rows, M.length, units, tasks)


def sized(gigabytes: float, tasks: str, **settings: Any) -> Scale:
    """A sample of about this size, with the trajectories of long-form reasoning."""
    rows = 2048 if gigabytes < 2 else 4096
    return Scale(rows, int(gigabytes * 1e9 / BYTES_PER_TOKEN / rows), tasks=tasks, **settings)


def run(scale: Scale) -> dict[str, Any]:
    """Measure one configuration in its own process."""
    command = [sys.executable, "-m", "benchmarks.scale_training", json.dumps(asdict(scale))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    show(found)
    return found


def show(found: dict[str, Any]) -> None:
    dump, hit = typical(found, "record"), typical(found, "replay")
    console.print(
        f"{format_size(found['sample_bytes'])}, {found['units']} units, tasks {found['tasks']}: "
        f"recorded: blocked {dump['blocked']:.2f} s, {format_size(dump['memory'])} more on the driver; "
        f"hit: blocked {hit['blocked']:.2f} s, {format_size(hit['memory'])}"
    )


def typical(found: dict[str, Any], mode: str) -> dict[str, float]:
    """The second step, because the first one also starts processes, and a third one has nothing left to prefetch."""
    step: dict[str, float] = found[mode][1]
    return step


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    where = (
        f"Measured on {machine['date']} with verl {machine['packages']['verl']} on {machine['cores']} cores of "
        f"{machine['cpu']}, {format_size(machine['memory_bytes'])} of memory, {machine['file_system']}. Storage units, "
        "tasks and the driver share these cores."
    )
    rows = sorted(
        [*found_of(result, "sizes", "sample_bytes"), *found_of(result, "driver", "sample_bytes")],
        key=lambda found: (found["length"] * found["rows"], found["tasks"] == "off"),
    )
    tables = [
        "**Samples of different sizes**, 8 storage units",
        _table(["moved by"], [[_mover(found), found] for found in rows]),
        f"**Numbers of storage units**, {M.rows} trajectories of {M.length} tokens",
        _table(["units", "moved by"], [[str(f["units"]), _mover(f), f] for f in found_of(result, "units", "units")]),
        "**Numbers of tasks at once**, 8 storage units",
        _table(["tasks at once"], [[str(f["at_once"]), f] for f in found_of(result, "at_once", "at_once")]),
        *projection(result),
    ]
    return "\n\n".join([IMAGE, where, *tables])


def projection(result: dict[str, Any]) -> Iterable[str]:
    """What a gigabyte costs one node, and what that means for a large batch on many nodes."""
    found = found_of(result, "sizes", "sample_bytes")
    if len(found) < 2:
        return
    small, large = found[0], found[-1]
    gigabytes = (large["sample_bytes"] - small["sample_bytes"]) / 1e9
    slope = {
        mode: (typical(large, mode)["total"] - typical(small, mode)["total"]) / gigabytes
        for mode in ("record", "replay")
    }
    share = LARGE_GB / LARGE_NODES
    yield f"**A batch of {LARGE_GB} GB on {LARGE_NODES} nodes**"
    record, hit, cores = slope["record"], slope["replay"], result["machine"]["cores"]
    yield (
        f"Between the smallest and the largest sample, each further gigabyte takes {record:.1f} s in the background of "
        f"a recorded step and {hit:.1f} s of a hit, on the {cores} cores of this machine. With {LARGE_GB} GB spread "
        f"evenly over {LARGE_NODES} nodes, each node moves {share:.2f} GB. If a node is as fast as this machine, that "
        f"takes about {record * share:.0f} s in the background of a recorded step and {hit * share:.0f} s of a hit. "
        "This is an estimate, not a measurement. It assumes that the rows lie evenly on the nodes, that the shared "
        "folder keeps up with all nodes at once, and that the network between the nodes is not the limit. Nodes with "
        "more cores are faster."
    )


def _mover(found: dict[str, Any]) -> str:
    return "driver" if found["tasks"] == "off" else "tasks"


def _table(labels: list[str], rows: list[list[Any]]) -> str:
    titles = ["sample", "on disk", *labels, "record: blocked", "record: total", "record: driver memory"]
    titles += ["hit: blocked", "hit: total", "hit: driver memory"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for *shown, found in rows:
        cells = [format_size(found["sample_bytes"]), format_size(found["stored_bytes"]), *shown]
        for mode in ("record", "replay"):
            step = typical(found, mode)
            cells += [f"{step['blocked']:.2f} s", f"{step['total']:.1f} s", format_size(step["memory"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


COLORS = {"tasks": "#3d8b7d", "driver": "#e07a5f"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 340, 220, 62, 34, 36
FONT = 'font-family="sans-serif" font-size="12"'


def draw(result: dict[str, Any]) -> str:
    """An SVG: seconds on the training thread and memory of the driver, by size of the sample."""
    panels = (
        ("Recorded step: blocked, s", "record", "blocked", 1.0),
        ("Recorded step: driver memory, GB", "record", "memory", 1e9),
        ("Hit: blocked, s", "replay", "blocked", 1.0),
        ("Hit: driver memory, GB", "replay", "memory", 1e9),
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {2 * HEIGHT + 24}" {FONT}>',
        f'<rect width="{2 * WIDTH}" height="{2 * HEIGHT + 24}" fill="#ffffff"/>',
    ]
    for number, (title, mode, name, unit) in enumerate(panels):
        curves = {
            label: [
                (found["sample_bytes"] / 1e9, typical(found, mode)[name] / unit)
                for found in found_of(result, group, "sample_bytes")
            ]
            for label, group in (("tasks", "sizes"), ("driver", "driver"))
        }
        lines += _panel(title, curves, (number % 2) * WIDTH, (number // 2) * HEIGHT)
    for number, (label, color) in enumerate(COLORS.items()):
        x, y = LEFT + number * 150, 2 * HEIGHT + 8
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 11}" fill="#222222">moved by {label}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _panel(title: str, curves: dict[str, list[tuple[float, float]]], left: int, top: int) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    right, high = max(x for x, _ in points), max(max(y for _, y in points), 1e-9)
    width, height = WIDTH - LEFT - 16, HEIGHT - TOP - BOTTOM
    x0, y0 = left + LEFT, top + TOP + height

    def place(x: float, y: float) -> str:
        return f"{x0 + x / right * width:.1f},{y0 - y / high * height:.1f}"

    lines = [
        f'<text x="{left + 10}" y="{top + 20}" fill="#222222" font-weight="bold">{escape(title)}</text>',
        f'<path d="M{x0},{y0 - height} V{y0} H{x0 + width}" fill="none" stroke="#8d99ae"/>',
        f'<text x="{x0 - 6}" y="{y0}" fill="#222222" text-anchor="end">0</text>',
        f'<text x="{x0 - 6}" y="{y0 - height + 8}" fill="#222222" text-anchor="end">{high:.3g}</text>',
        f'<text x="{x0 + width}" y="{y0 + 18}" fill="#222222" text-anchor="end">{right:.3g} GB per sample</text>',
    ]
    for label, curve in curves.items():
        path = " ".join(place(*point) for point in curve)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[label]}" stroke-width="2"/>')
        for x, y in curve:
            cx, cy = place(x, y).split(",")
            lines.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{COLORS[label]}"/>')
    return lines


if __name__ == "__main__":
    main()
