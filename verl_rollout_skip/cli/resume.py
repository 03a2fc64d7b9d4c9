"""``rollout-skip resume``: go on with a training from its manifest."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from verl_rollout_skip.cli.commands import Result
from verl_rollout_skip.cli.text import line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Go on with a recorded training: recorded steps are loaded, the following ones\n"
        "are generated and recorded into the same run. If the configuration says that\n"
        "training resumes from a checkpoint and there is one, it starts there. Needs\n"
        "verl, and what the training needs, in this environment."
    )
    parser.epilog = (
        "examples:\n"
        "  rollout-skip resume /data/dumps/RUN/VARIANT/manifest.json\n"
        "  rollout-skip resume MANIFEST trainer.total_training_steps=100\n"
        "  rollout-skip resume MANIFEST actor_rollout_ref.model.path=/other/place\n"
        "                                 the model was moved; its content is checked\n"
        "  rollout-skip resume MANIFEST --dry-run    only say what would be run\n"
    )
    parser.add_argument("manifest", metavar="MANIFEST", help="a manifest.json, or the folder that it is in")
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", help="settings to change, as on verl's command line"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything and train nothing")


def run(parsed: argparse.Namespace) -> Result:
    from verl_rollout_skip.entries import describe_steps
    from verl_rollout_skip.messages import show_messages
    from verl_rollout_skip.resume import check_environment, own_trainer, plan_resumption, run_resumption

    show_messages()
    resumption = plan_resumption(parsed.manifest, parsed.overrides)
    check_environment()
    # Imported late: torch takes seconds, and a wrong path should not.
    from verl_rollout_skip.rollout import RolloutSkip
    from verl_rollout_skip.store.store import RolloutStore

    with RolloutSkip.open(resumption.config, own_trainer(resumption.manifest)):
        pass  # whatever does not fit is told by now
    recorded = RolloutStore(resumption.manifest.path.removesuffix("/manifest.json"))
    data = {
        "manifest": resumption.manifest.path,
        "trainer": resumption.manifest.trainer,
        "mode": resumption.config.rollout_skip.mode,
        "recorded_steps": describe_steps({key.step for key in recorded}),
        "total_training_steps": resumption.config.trainer.get("total_training_steps"),
        "followed": resumption.remapped,
        "trained": not parsed.dry_run,
    }
    if not parsed.dry_run:
        run_resumption(resumption)
    return Result(data)


def render(console: Console, data: dict[str, Any]) -> None:
    line(console, f"{data['manifest']}: {data['trainer']}, steps {data['recorded_steps']} are recorded")
    line(console, f"  mode {data['mode']}")
    for key, value in data["followed"].items():
        line(console, f"  {key} followed to {value}")
    if not data["trained"]:
        line(console, "nothing was run (--dry-run)")
