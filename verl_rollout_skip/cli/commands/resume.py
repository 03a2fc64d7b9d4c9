"""``rollout-skip resume``: continues a training from its manifest."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Argument, Command, Result, path_argument
from verl_rollout_skip.cli.output import print_line


@click.command(
    cls=Command,
    examples="rollout-skip resume /data/dumps/RUN/VARIANT/manifest.json\n"
    "rollout-skip resume MANIFEST trainer.total_training_steps=100\n"
    "rollout-skip resume MANIFEST actor_rollout_ref.model.path=/new/path\n"
    "                               the model was moved; its content is checked\n"
    "rollout-skip resume MANIFEST --dry-run    only show what would run",
)
@path_argument("manifest", "a manifest.json, or its folder")
@click.argument(
    "overrides", cls=Argument, nargs=-1, metavar="[KEY=VALUE]...", help="settings to change, as on verl's command line"
)
@click.option("--dry-run", is_flag=True, help="check everything, but do not train")
def command(manifest: str, overrides: tuple[str, ...], dry_run: bool) -> Result:
    """Continue a recorded training: recorded steps are loaded; later steps are generated and recorded into the same
    run.

    If the configuration enables resuming from a checkpoint and one exists, the training starts from it. This
    environment must have verl and everything else that the training needs.
    """
    from verl_rollout_skip.config.skip_config import describe_steps
    from verl_rollout_skip.tools.resume import check_environment, own_trainer, plan_resumption, run_resumption
    from verl_rollout_skip.trainers.console import show_messages

    show_messages()
    resumption = plan_resumption(manifest, overrides)
    check_environment()
    # Imported late: importing torch takes seconds, and a wrong path should fail immediately.
    from verl_rollout_skip.replay.rollout import RolloutSkip
    from verl_rollout_skip.store.reader import StoreReader

    with RolloutSkip.open(resumption.config, own_trainer(resumption.manifest)):
        pass  # opening reports every mismatch
    recorded = StoreReader.at(resumption.manifest.folder)
    data = {
        "manifest": resumption.manifest.path,
        "trainer": resumption.manifest.trainer,
        "mode": resumption.config.rollout_skip.mode,
        "recorded_steps": describe_steps({key.step for key in recorded}),
        "total_training_steps": resumption.config.trainer.get("total_training_steps"),
        "followed": resumption.remapped,
        "trained": not dry_run,
    }
    if not dry_run:
        run_resumption(resumption)
    return Result(data, render)


def render(console: Console, data: dict[str, Any]) -> None:
    print_line(console, f"{data['manifest']}: {data['trainer']}, recorded steps {data['recorded_steps']}")
    print_line(console, f"  mode {data['mode']}")
    for key, value in data["followed"].items():
        print_line(console, f"  {key} is now {value} too")
    if not data["trained"]:
        print_line(console, "nothing was run (--dry-run)")
