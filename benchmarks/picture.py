"""Draws the chart in docs/benchmarks.md from the last measurement: ``python -m benchmarks.picture``.

It shows the time of a step and of a whole training, with and without this package.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.trainings import RESULTS

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "trainings.svg"
RUNS = {"off": "without", "record": "record", "cache": "cache", "replay": "replay"}
PARTS = {"start": "#8d99ae", "rollout": "#e07a5f", "training": "#3d8b7d"}
WIDTH, ROW, LEFT = 720, 28, 90
PANEL = 34 + len(RUNS) * ROW + 12
FONT = 'font-family="sans-serif" font-size="13"'


def main() -> None:
    result = json.loads(RESULTS.read_text())["v0"]
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(result))
    print(f"written to {PICTURE}")


def seconds(run: dict[str, Any], steps: int) -> dict[str, float]:
    """The seconds of this many steps of a run, by part."""
    rollout = run["rollout_s"] * steps
    return {"rollout": rollout, "training": run["step_s"] * steps - rollout}


def draw(result: dict[str, Any]) -> str:
    """An SVG with one panel for a step and one for the whole training."""
    runs = {label: result["runs"][name] for name, label in RUNS.items()}
    step = {label: seconds(run, 1) for label, run in runs.items()}
    whole = {label: {"start": run["start_s"], **seconds(run, result["steps"])} for label, run in runs.items()}
    machine = result["machine"]
    upper = _panel(f"Seconds of a step, {machine['cpu']}, {machine['cores']} cores, no GPU", step, 0, 2)
    lower = _panel(f"Seconds of a training of {result['steps']} steps with its start", whole, PANEL, 0)
    height = 2 * PANEL + 30
    legend = []
    for number, (part, color) in enumerate(PARTS.items()):
        x = LEFT + number * 130
        legend.append(f'<rect x="{x}" y="{height - 24}" width="12" height="12" fill="{color}"/>')
        legend.append(f'<text x="{x + 18}" y="{height - 13}" fill="#222222">{part}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *upper,
            *lower,
            *legend,
            "</svg>",
            "",
        ]
    )


def _panel(title: str, rows: dict[str, dict[str, float]], top: int, digits: int) -> list[str]:
    scale = (WIDTH - LEFT - 70) / max(sum(parts.values()) for parts in rows.values())
    lines = [f'<text x="10" y="{top + 20}" fill="#222222" font-weight="bold">{escape(title)}</text>']
    for number, (label, parts) in enumerate(rows.items()):
        lines += _row(label, parts, top + 34 + number * ROW, scale, digits)
    return lines


def _row(label: str, parts: dict[str, float], y: int, scale: float, digits: int) -> list[str]:
    lines = [f'<text x="10" y="{y + 15}" fill="#222222">{escape(label)}</text>']
    x = float(LEFT)
    for part, value in parts.items():
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="20" fill="{PARTS[part]}"/>')
        x += value * scale
    total = f"{sum(parts.values()):.{digits}f} s"
    return [*lines, f'<text x="{x + 6:.1f}" y="{y + 15}" fill="#222222">{total}</text>']


if __name__ == "__main__":
    main()
