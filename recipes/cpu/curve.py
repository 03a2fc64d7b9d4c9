"""The learning curve of a training, as a sentence and as an SVG image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import chain

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 48, 48
WINDOW = 5


@dataclass(frozen=True)
class Curve:
    """By step: the mean reward of the training batch, and the accuracy on additions that are not in the training
    data."""

    rewards: Mapping[int, float]
    accuracies: Mapping[int, float]

    def smooth(self) -> dict[int, float]:
        """For each step, the mean over the last few steps."""
        steps = sorted(self.rewards)
        windows = {step: steps[max(0, place + 1 - WINDOW) : place + 1] for place, step in enumerate(steps)}
        return {step: sum(self.rewards[each] for each in window) / len(window) for step, window in windows.items()}

    def summary(self) -> str:
        values = [self.rewards[step] for step in sorted(self.rewards)]
        few = min(WINDOW, len(values))
        if not few:
            return "No step was finished."
        first, last = sum(values[:few]) / few, sum(values[-few:]) / few
        text = f"Mean reward: {first:.2f} in the first {few} steps, {last:.2f} in the last {few}."
        if self.accuracies:
            start, end = min(self.accuracies), max(self.accuracies)
            text += (
                f" Accuracy on additions that are not in the training data: {self.accuracies[start]:.0%} after step "
                f"{start}, {self.accuracies[end]:.0%} after step {end}."
            )
        return text


def draw(curve: Curve, title: str) -> str:
    """An SVG image: one point per step, their moving mean as a line, validation as circles."""
    last = max(chain(curve.rewards, curve.accuracies, [1]))

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / last, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value, 1)

    grid = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}" stroke="#ddd"/>'
        f'<text x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:.1f}</text>'
        for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    numbers = [
        f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
        for step in range(0, last + 1, max(1, round(last / 10)))
    ]
    points = [f'<circle cx="{x(step)}" cy="{y(value)}" r="2" fill="#9bc"/>' for step, value in curve.rewards.items()]
    line = " ".join(f"{x(step)},{y(value)}" for step, value in curve.smooth().items())
    held_out = [
        f'<circle cx="{x(step)}" cy="{y(value)}" r="4" fill="none" stroke="#c50" stroke-width="2"/>'
        for step, value in curve.accuracies.items()
    ]
    legend = "blue: mean reward per step, and over five steps; orange: accuracy on additions not in the training data"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT}" y="38" fill="#777">{legend}</text>',
        *grid,
        *numbers,
        f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">step</text>',
        *points,
        f'<polyline points="{line}" fill="none" stroke="#059" stroke-width="2"/>',
        *held_out,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
