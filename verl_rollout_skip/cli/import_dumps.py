"""``rollout-skip import``: dumps of verl's own rollout skip, read without running what is in them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_rollout_skip.cli.arguments import describe
from verl_rollout_skip.cli.commands import Result
from verl_rollout_skip.cli.text import counted, line, table
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.upstream.layouts import Layout, find_dumps

_VOUCHED = (
    "The manifest says what --config says; the dumps themselves do not tell, so you vouch for it. Model and data files "
    "were looked at as they are today."
)
_NOT_KNOWN = (
    "The manifest says that the settings are not known. A training uses these rollouts only with rollout_skip.source="
    "{folder} and rollout_skip.on_mismatch=reuse, and counts as informational. Import with --config to vouch for them."
)
_NO_INPUT = (
    "{count} without input, because this version of verl does not dump it: nobody knows which prompts and answers "
    "belong to these responses. They can be looked at, compared and exported, but no training loads them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Import dumps of verl's own rollout skip (0.6 to 0.9). They are pickles, which can hold code. This command "
        "reads them with a reader of its own that runs nothing: it knows tensors, arrays and plain containers, and "
        "refuses a file that asks for anything else. It still wants --trust-pickle, so that you think about where they "
        "come from. Dumps do not say what they were made with. With --config, the resolved configuration of the "
        "training that made them, they become a variant below DST (a dump_dir) that a training with the same settings "
        "finds; you vouch that it is the right one. Without it DST becomes a variant whose settings are not known: it "
        "is used only as rollout_skip.source with on_mismatch=reuse, and then counts as informational. Only verl 0.8 "
        "dumps the input of a rollout step too; entries without it can be looked at, compared and exported, but no "
        "training loads them. The exit code is 1 if dumps are damaged or cannot be stored; the others are imported.",
        "  rollout-skip import /data/verl_dumps /data/imported --trust-pickle\n"
        "  rollout-skip import verl_dumps dumps --config config.yaml --trust-pickle",
    )
    parser.add_argument(
        "path", metavar="PATH", help="skip_dump_dir or dump_dir of verl, or a single dump; a local path"
    )
    parser.add_argument("dst", metavar="DST", help="where to: a folder or a URL")
    parser.add_argument("--trust-pickle", action="store_true", help="read pickles; needed")
    parser.add_argument("--config", metavar="FILE", help="the training's resolved configuration (hydra's config.yaml)")
    parser.add_argument(
        "--step", type=int, default=1, metavar="N", help="the step of a dump that has none (default: 1)"
    )


def run(parsed: argparse.Namespace) -> Result:
    if not parsed.trust_pickle:
        raise ConfigError(
            f"{parsed.path} is read as pickles, which can hold code. Nothing of it will be run, but say --trust-pickle "
            "if you know where it comes from."
        )
    path = Path(parsed.path).expanduser()
    dumps, incomplete = find_dumps(path, parsed.step)
    # Imported late: torch takes seconds, and a wrong path should not.
    from verl_rollout_skip.upstream.importing import Destination, import_dumps, read_config

    config = None if parsed.config is None else read_config(Path(parsed.config).expanduser())
    layout = dumps[0].layout if dumps else Layout.STEPS
    destination = Destination(parsed.dst, path, layout, config)
    done = import_dumps(dumps, destination)
    data = {
        "path": str(path),
        "destination": destination.folder,
        "layout": layout.value,
        "settings_known": config is not None,
        "entries": [
            {
                "step": entry.key.step,
                "gen_batch": entry.key.gen_batch,
                "rows": entry.rows,
                "has_input": entry.has_input,
                "path": entry.path,
            }
            for entry in done.entries
        ],
        "skipped": [{"path": where, "reason": reason} for where, reason in done.skipped] + _split(incomplete),
        "problems": [{"path": where, "error": error} for where, error in done.problems],
    }
    return Result(data, 1 if done.problems else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    line(console, f"dumps of verl {data['layout']} into {data['destination']}", "bold")
    rows = [
        (entry["step"], entry["gen_batch"], entry["rows"], "yes" if entry["has_input"] else "no")
        for entry in data["entries"]
    ]
    table(console, ("step", "gen batch", "rows", "input"), rows)
    for skipped in data["skipped"]:
        line(console, f"left out: {skipped['path']}: {skipped['reason']}", "yellow")
    for problem in data["problems"]:
        line(console, f"{problem['path']}: {problem['error']}", "red")
    if not data["entries"]:
        return
    line(console, _VOUCHED if data["settings_known"] else _NOT_KNOWN.format(folder=data["destination"]))
    without = sum(not entry["has_input"] for entry in data["entries"])
    if without:
        line(console, _NO_INPUT.format(count=counted(without, "entry", "entries")))


def _split(notes: list[str]) -> list[dict[str, str]]:
    return [dict(zip(("path", "reason"), note.split(": ", 1), strict=True)) for note in notes]
