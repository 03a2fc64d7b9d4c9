"""The section of the report about the mismatch of rollout and trainer: tables as JSON, for variants with columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.report.entry_view import Json
from verl_rollout_skip.report.tokens import TokenTexts
from verl_rollout_skip.runs.columns import trainings_with_columns
from verl_rollout_skip.runs.manifest import Manifest
from verl_rollout_skip.tools.mismatch import REJECTIONS, TRUNCATIONS, Mismatch, measure_mismatch
from verl_rollout_skip.tools.mismatch.groups import Group
from verl_rollout_skip.tools.mismatch.log_probs import Figures

_WORST = 10


def find_mismatch(variant: str, keys: Sequence[RolloutKey], manifest: Manifest | None) -> Mismatch | None:
    """The mismatch in the steps of these keys, of the oldest training with columns; None without columns of them."""
    steps = {key.step for key in keys}
    for training in trainings_with_columns(variant)[:1]:
        return measure_mismatch(
            variant, training, wanted=lambda key: key.step in steps, worst=_WORST, manifest=manifest
        )
    return None


def step_statistics(found: Mismatch) -> dict[int, Json]:
    """What the charts show, by step: the figures of its first update."""
    first: dict[int, Json] = {}
    for step in found.steps:
        if step.figures is not None:
            values = {"mismatch_k3": step.figures.k3, "mismatch_mean_abs": step.figures.mean_abs}
            shown = {name: value if math.isfinite(value) else None for name, value in values.items()}
            first.setdefault(step.key.step, shown)
    return first


def mismatch_view(found: Mismatch, texts: TokenTexts) -> Json:
    """The tables of the section. Every cell is a text, except those with a token in its context."""
    tables = [
        _table("By step", ("step", "tokens", "k1", "k3", "mean abs", "max abs", "p1", "p99", "χ² rows"), _steps(found)),
        _table("By position in the response", _group_headers("position"), map(_group, found.positions)),
    ]
    if len(found.turns) > 1:
        tables.append(_table("By turn", _group_headers("turn"), map(_group, found.turns)))
    by_token = [[_text(texts, (group.first,)), *_group(group)[1:]] for group in found.tokens]
    tables.append(_table("Tokens with the largest share of k3", _group_headers("token"), by_token, left=1))
    tables.append(_table("Worst tokens", ("step", "row", "token", "trainer", "rollout", "text"), _worst(found, texts)))
    headers = ("setting", "level", "threshold", "tokens", "rows", "mean weight", "max weight", "effective")
    tables.append(_table("What if: truncation and rejection", headers, _rules(found), left=2))
    return {
        "training": found.training,
        "notes": [*found.notes, *(f"{key}: {error}" for key, error in found.problems)],
        "tables": [table for table in tables if table["rows"]],
    }


def _table(title: str, headers: Sequence[str], rows: Any, left: int = 0) -> Json:
    return {"title": title, "headers": list(headers), "rows": [list(row) for row in rows], "left": left}


def _group_headers(name: str) -> tuple[str, ...]:
    return (name, "tokens", "k1", "k3", "mean abs", "max abs")


def _steps(found: Mismatch) -> list[list[str]]:
    return [[str(step.key.step), *_figures(step.figures)] for step in found.steps if step.figures is not None]


def _figures(figures: Figures) -> list[str]:
    values = (figures.k1, figures.k3, figures.mean_abs, figures.max_abs)
    percentiles = (f"{figures.percentiles[name]:.3f}" for name in ("p1", "p99"))
    return [f"{figures.tokens:,}", *map(_small, values), *percentiles, _small(figures.chi2_seq)]


def _group(group: Group) -> list[str]:
    name = str(group.first) if group.first == group.last else f"{group.first}–{group.last}"
    values = (group.k1, group.k3, group.mean_abs, group.max_abs)
    return [name, f"{group.tokens:,}", *map(_small, values)]


def _worst(found: Mismatch, texts: TokenTexts) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for token in found.worst:
        context = None
        if token.token is not None:
            context = [_text(texts, tokens) for tokens in (token.before, (token.token,), token.after)]
        numbers = (f"{token.old:.4f}", f"{token.rollout:.4f}")
        rows.append([str(token.key.step), str(token.place[1]), str(token.position), *numbers, context or ""])
    return rows


def _rules(found: Mismatch) -> list[list[str]]:
    rows = []
    for rule in (*TRUNCATIONS, *REJECTIONS):
        effect = found.mean_effect(rule)
        shares = (_percent(effect["tokens"]), _percent(effect["sequences"]))
        weights = (_plain(effect["mean_weight"]), _plain(effect["max_weight"]), _percent(effect["effective"]))
        rows.append([rule.kind.value, rule.level, rule.threshold, *shares, *weights])
    return rows


def _text(texts: TokenTexts, tokens: Sequence[int]) -> str:
    separator = "" if texts.source is not None else " "
    return separator.join(piece.text for piece in texts.pieces(tokens))


def _small(value: float) -> str:
    return f"{value:.2g}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g}%"
