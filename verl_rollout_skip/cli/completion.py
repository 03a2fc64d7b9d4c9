"""``rollout-skip completion``: what the Tab key offers in bash, zsh and fish, made from the program's own arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from verl_rollout_skip.cli.arguments import describe
from verl_rollout_skip.cli.commands import COMMANDS, Result

_PROGRAM = "rollout-skip"
_PATHS = {"PATH", "A", "B", "SRC", "DST", "DIR", "FILE", "OUT", "FOLDER"}


@dataclass(frozen=True)
class Option:
    """An option: its names, what it takes, and its help."""

    names: tuple[str, ...]
    takes: str | None
    choices: tuple[str, ...]
    help: str

    @property
    def takes_path(self) -> bool:
        return self.takes in _PATHS


@dataclass(frozen=True)
class Completion:
    """A command as the Tab key sees it: its options, and the words or paths that it takes."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Print a script that makes the Tab key complete commands, options and paths. bash: put "
        "'eval \"$(rollout-skip completion bash)\"' into ~/.bashrc. zsh: write it to a file named _rollout-skip in a "
        "folder of $fpath. fish: write it to ~/.config/fish/completions/rollout-skip.fish.",
        "  rollout-skip completion bash\n  rollout-skip completion fish",
    )
    parser.add_argument("shell", choices=sorted(_SCRIPTS), metavar="SHELL", help="bash, fish or zsh")


def run(parsed: argparse.Namespace) -> Result:
    return Result({"shell": parsed.shell, "script": _SCRIPTS[parsed.shell](completions())})


def render(console: Console, data: dict[str, Any]) -> None:
    console.file.write(data["script"])


def completions() -> list[Completion]:
    """All commands with their options, from the parsers themselves."""
    from verl_rollout_skip.cli.command import make_parser

    parsers = subparsers_of(make_parser())
    return [_completion(command.name, command.help, parsers[command.name]) for command in COMMANDS]


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _completion(name: str, help: str, parser: argparse.ArgumentParser) -> Completion:
    options: list[Option] = []
    words: list[str] = []
    for action in parser._actions:
        choices = tuple(str(choice) for choice in action.choices or ())
        if action.option_strings:
            takes = None if action.nargs == 0 else str(action.metavar or action.dest.upper())
            text = (action.help or "") % {"choices": ", ".join(choices), "default": action.default}
            options.append(Option(tuple(action.option_strings), takes, choices, text))
        else:
            words += choices
    return Completion(name, help, tuple(options), tuple(words))


def _bash(commands: list[Completion]) -> str:
    values, options, words = [], [], []
    for command in commands:
        names = [name for option in command.options for name in option.names]
        options.append(f"        {command.name}) {_bash_reply(names)} ;;")
        if command.words:
            words.append(f"        {command.name}) {_bash_reply(command.words)}; return ;;")
        for option in command.options:
            if option.takes is not None and not option.takes_path:
                pattern = "|".join(f'"{command.name} {name}"' for name in option.names)
                reply = f"{_bash_reply(option.choices)}; return" if option.choices else "return"
                values.append(f"        {pattern}) {reply} ;;")
    first = [*(command.name for command in commands), "--help", "--version"]
    lines = [
        "_rollout_skip() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"',
        "    COMPREPLY=()",
        f'    if [ "$COMP_CWORD" -eq 1 ]; then {_bash_reply(first)}; return; fi',
        '    case "$command $prev" in',
        *values,
        "    esac",
        '    if [[ "$cur" == -* ]]; then',
        '        case "$command" in',
        *(f"    {line}" for line in options),
        "        esac",
        "        return",
        "    fi",
        '    case "$command" in',
        *words,
        "    esac",
        "    local IFS=$'\\n'",
        '    COMPREPLY=($(compgen -f -- "$cur"))',
        "}",
        f"complete -o filenames -F _rollout_skip {_PROGRAM}",
    ]
    return "\n".join(lines) + "\n"


def _bash_reply(words: Iterable[str]) -> str:
    return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$cur"))'


def _zsh(commands: list[Completion]) -> str:
    cases = []
    for command in commands:
        rest = f"({' '.join(command.words)})" if command.words else "_files"
        specs = [*(_zsh_option(option) for option in command.options), f"'*:word:{rest}'"]
        cases += [f"        {command.name})", "            _arguments \\"]
        cases += [f"                {spec} \\" for spec in specs[:-1]] + [
            f"                {specs[-1]}",
            "            ;;",
        ]
    lines = [
        f"#compdef {_PROGRAM}",
        "_rollout_skip() {",
        "    local -a commands",
        "    commands=(",
        *(f"        {_quoted(f'{command.name}:{command.help}')}" for command in commands),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe 'command' commands",
        "        return",
        "    fi",
        '    local command="$words[2]"',
        "    shift words",
        "    (( CURRENT-- ))",
        '    case "$command" in',
        *cases,
        "    esac",
        "}",
        # As a file of $fpath it is called when Tab is pressed; sourced, it has to be made known.
        'if [ "$funcstack[1]" = "_rollout-skip" ]; then',
        '    _rollout_skip "$@"',
        "else",
        f"    compdef _rollout_skip {_PROGRAM}",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _zsh_option(option: Option) -> str:
    text = "".join(f"\\{letter}" if letter in "[]:" else letter for letter in option.help)
    taken = ""
    if option.takes is not None:
        action = f"({' '.join(option.choices)})" if option.choices else "_files" if option.takes_path else " "
        taken = f":{option.takes}:{action}"
    if len(option.names) == 1:
        return _quoted(f"{option.names[0]}[{text}]{taken}")
    return f"'({' '.join(option.names)})'{{{','.join(option.names)}}}{_quoted(f'[{text}]{taken}')}"


def _fish(commands: list[Completion]) -> str:
    first = f"complete -c {_PROGRAM} -n __fish_use_subcommand -f"
    lines = [f"{first} -l help -d 'show this help message and exit'"]
    lines += [f"{first} -a {command.name} -d {_quoted(command.help)}" for command in commands]
    for command in commands:
        here = f"complete -c {_PROGRAM} -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{here} -f -a {_quoted(' '.join(command.words))}")
        lines += [f"{here} {_fish_option(option)} -d {_quoted(option.help)}" for option in command.options]
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    if option.takes is None:
        return names
    if option.takes_path:
        return f"{names} -r -F"
    return f"{names} -x" + (f" -a {_quoted(' '.join(option.choices))}" if option.choices else "")


def _quoted(text: str) -> str:
    """In single quotes, which all three shells read alike but for a quote within."""
    return "'" + text.replace("'", "'\\''") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
