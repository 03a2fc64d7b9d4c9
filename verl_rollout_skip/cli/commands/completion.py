"""``rollout-skip completion``: prints Click's shell completion script."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import get_completion_class
from rich.console import Console

from verl_rollout_skip.cli.command import Argument, Command, Result


@click.command(cls=Command, examples="rollout-skip completion bash\nrollout-skip completion fish")
@click.argument(
    "shell", cls=Argument, type=click.Choice(["bash", "fish", "zsh"]), metavar="SHELL", help="bash, fish or zsh"
)
def command(shell: str) -> Result:
    """Print a shell script that completes commands, options and paths.

    bash: add 'eval "$(rollout-skip completion bash)"' to ~/.bashrc. zsh: write the output to a file named _rollout-skip
    in a folder of $fpath. fish: write it to ~/.config/fish/completions/rollout-skip.fish.
    """
    from verl_rollout_skip.cli.program import COMPLETE, NAME, program

    kind = get_completion_class(shell)
    assert kind is not None
    return Result({"shell": shell, "script": kind(program, {}, NAME, COMPLETE).source()}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    console.file.write(f"{data['script'].strip()}\n")
