"""Draws the picture of the README from the last measurement: ``python -m benchmarks.picture``.

Where the time of a run goes, from its start to its last step, with and without this package.
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
WIDTH, ROW, LEFT = 720, 34, 90
FONT = 'font-family="sans-serif" font-size="13"'


def main() -> None:
    result = json.loads(RESULTS.read_text())["v0"]
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(result))
    print(f"written to {PICTURE}")


def seconds(run: dict[str, Any], steps: int) -> dict[str, float]:
    """The parts of a run of so many steps."""
    rollout = run["rollout_s"] * steps
    return {"start": run["start_s"], "rollout": rollout, "training": run["step_s"] * steps - rollout}


def draw(result: dict[str, Any]) -> str:
    steps = result["steps"]
    rows = {label: seconds(result["runs"][name], steps) for name, label in RUNS.items()}
    scale = (WIDTH - LEFT - 70) / max(sum(parts.values()) for parts in rows.values())
    height = ROW * len(rows) + 74
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="20" fill="#222222">{escape(_title(result))}</text>',
    ]
    for number, (label, parts) in enumerate(rows.items()):
        lines += _row(label, parts, 36 + number * ROW, scale)
    for number, (part, colour) in enumerate(PARTS.items()):
        x = LEFT + number * 130
        lines.append(f'<rect x="{x}" y="{height - 24}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="{height - 13}" fill="#222222">{part}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _title(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"Seconds of a training of {result['steps']} steps, {machine['cpu']}, {machine['cores']} cores, no GPU"


def _row(label: str, parts: dict[str, float], y: int, scale: float) -> list[str]:
    lines = [f'<text x="10" y="{y + 16}" fill="#222222">{escape(label)}</text>']
    x = float(LEFT)
    for part, value in parts.items():
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="22" fill="{PARTS[part]}"/>')
        x += value * scale
    return [*lines, f'<text x="{x + 6:.1f}" y="{y + 16}" fill="#222222">{sum(parts.values()):.0f} s</text>']


if __name__ == "__main__":
    main()
