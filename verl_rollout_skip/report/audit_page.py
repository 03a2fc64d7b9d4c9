"""An audit as one self-contained HTML file, with the curves of both trainings on top of each other."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from verl_rollout_skip._version import __version__
from verl_rollout_skip.report.collect import script_json
from verl_rollout_skip.report.page import Template, assemble, write_page
from verl_rollout_skip.tools.audit import Audit, Kind, Name, explain, summarize, values_of
from verl_rollout_skip.tools.ledgers import Side

TEMPLATE = Template("audit.html", ("dom", "theme", "charts", "audit"))

Curves = dict[Name, dict[int, float]]
"""The values of each figure by step."""


def write_audit(audits: Sequence[Audit], path: str | os.PathLike[str]) -> int:
    """Write the page to a file atomically and return its size in bytes."""
    return write_page(render_audit(audits), path, "audit")


def render_audit(audits: Sequence[Audit]) -> bytes:
    """The page. Several audits share it; the reader chooses one."""
    where = audits[0].b.storage.where().rstrip("/")
    head = {
        "title": "/".join(where.split("/")[-2:]),
        "where": where,
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "made_by": f"verl-rollout-skip {__version__}",
    }
    return assemble(TEMPLATE, script_json({"head": head, "pairs": [_pair(audit) for audit in audits]}))


def _pair(audit: Audit) -> dict[str, Any]:
    steps = sorted({*audit.a.steps, *audit.b.steps})
    curves = [_curves(side) for side in (audit.a, audit.b)]
    compared = {figure.name: asdict(figure) for figure in audit.figures}
    names = sorted({*compared, *curves[0], *curves[1]}, key=lambda name: name.order)
    none = {"compared": 0, "differing": 0, "beyond": 0, "first_step": None, "max_absolute": None, "max_relative": None}
    figures = []
    for name in names:
        fields = {key: _number(value) for key, value in compared.get(name, none).items() if key != "name"}
        a, b = ([_number(curve[name].get(step)) for step in steps] if name in curve else None for curve in curves)
        is_tensor = name.kind is Kind.TENSOR
        figures.append({"stage": name.stage.value, "name": name.text, "tensor": is_tensor, **fields, "a": a, "b": b})
    return {
        "a": {"name": audit.a.name, "text": audit.a.describe()},
        "b": {"name": audit.b.name, "text": audit.b.describe()},
        "verdict": audit.verdict.value,
        "summary": summarize(audit),
        "notes": explain(audit),
        "steps": steps,
        "figures": figures,
    }


def _curves(side: Side) -> Curves:
    curves: Curves = {}
    for step in side.steps:
        for name, value in values_of(side.at(step).step).items():
            curves.setdefault(name, {})[step] = value
    return curves


def _number(value: Any) -> Any:
    """A value as JSON, which has no NaN and no infinities."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
