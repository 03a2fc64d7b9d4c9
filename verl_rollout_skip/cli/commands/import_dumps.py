"""``rollout-skip import``: imports dumps of verl's own rollout skip without executing any code in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import PATH, Command, Result, number_option, path_argument
from verl_rollout_skip.cli.output import pluralize, print_line, print_table
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.tools.upstream.layouts import Layout, find_dumps

_VOUCHED = (
    "The manifest has the settings from --config. The dumps do not contain them, so you vouch that they are right. "
    "Model and data files were read as they are now."
)
_NOT_KNOWN = (
    "The manifest says that the settings are unknown. A training uses these rollouts only with rollout_skip.source="
    "{folder} and rollout_skip.on_mismatch=reuse, and then marks all of them as off-policy. If you know the settings, "
    "import with --config."
)
_NO_INPUT = (
    "{count} without input, because this version of verl does not dump it: it is unknown which prompts and answers "
    "belong to these responses. You can inspect, compare and export them, but no training loads them."
)


@click.command(
    cls=Command,
    examples="rollout-skip import /data/verl_dumps /data/imported --trust-pickle\n"
    "rollout-skip import verl_dumps dumps --config config.yaml --trust-pickle",
)
@path_argument(help="skip_dump_dir or dump_dir of verl, or a single dump; a local path")
@path_argument("dst", "the destination: a folder or a URL")
@click.option("--trust-pickle", is_flag=True, help="allow reading pickles; required")
@click.option("--config", metavar="FILE", type=PATH, help="the training's resolved configuration (Hydra's config.yaml)")
@number_option("--step", "the step for a dump without one (default: 1)", 1)
def command(path: str, dst: str, trust_pickle: bool, config: str | None, step: int) -> Result:
    """Import dumps of verl's own rollout skip (0.6 to 0.9).

    These dumps are pickles, which can contain code: pass --trust-pickle if you know where they come from. The command
    reads them with its own parser, which never executes code. It accepts tensors, arrays and plain containers, and
    rejects a file that contains anything else.

    The dumps do not contain the settings of their training. With --config, its resolved configuration, they become a
    variant in DST (a dump_dir) that a training with the same settings finds; you vouch that the configuration is the
    right one. Without --config, DST becomes a variant with unknown settings. It can only be used as rollout_skip.source
    with on_mismatch=reuse, and all rollouts loaded from it are then marked as off-policy.

    Only verl 0.8 also dumps the input of a rollout step. You can inspect, compare and export entries without it, but no
    training loads them.

    The exit code is 1 if some dumps are damaged or cannot be stored; the others are imported.
    """
    if not trust_pickle:
        raise ConfigError(
            f"{path} contains pickles, which can contain code. This command never runs that code, but it requires "
            "--trust-pickle to confirm that you know where the dumps come from."
        )
    source = Path(path).expanduser()
    dumps, incomplete = find_dumps(source, step)
    # Imported late: importing torch takes seconds, and a wrong path should fail immediately.
    from verl_rollout_skip.tools.upstream.importing import Destination, import_dumps, read_config

    settings = None if config is None else read_config(Path(config).expanduser())
    layout = dumps[0].layout if dumps else Layout.STEPS
    destination = Destination(dst, source, layout, settings)
    done = import_dumps(dumps, destination)
    data = {
        "path": str(source),
        "destination": destination.folder,
        "layout": layout.value,
        "settings_known": settings is not None,
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
    return Result(data, render, 1 if done.problems else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    print_line(console, f"dumps of verl {data['layout']} into {data['destination']}", "bold")
    rows = [
        (entry["step"], entry["gen_batch"], entry["rows"], "yes" if entry["has_input"] else "no")
        for entry in data["entries"]
    ]
    print_table(console, ("step", "gen batch", "rows", "input"), rows)
    for skipped in data["skipped"]:
        print_line(console, f"skipped: {skipped['path']}: {skipped['reason']}", "yellow")
    for problem in data["problems"]:
        print_line(console, f"{problem['path']}: {problem['error']}", "red")
    if not data["entries"]:
        return
    print_line(console, _VOUCHED if data["settings_known"] else _NOT_KNOWN.format(folder=data["destination"]))
    without = sum(not entry["has_input"] for entry in data["entries"])
    if without:
        print_line(console, _NO_INPUT.format(count=pluralize(without, "entry", "entries")))


def _split(notes: list[str]) -> list[dict[str, str]]:
    return [dict(zip(("path", "reason"), note.split(": ", 1), strict=True)) for note in notes]
