"""Every command works after ``pip install verl-rollout-skip``, without verl and Ray, and decodes text.

The quick tests see only the packages that setup.cfg declares and their dependencies. The slow test
builds the wheel and installs it into a new environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tokenizers import Tokenizer, models

from tests.arithmetic_run import SAMPLES, conversation, encode, make_training
from tests.cli_program import ROOT
from tests.report.test_report import data_of
from tests.written_ledgers import write_examples
from verl_rollout_skip import RolloutKey
from verl_rollout_skip.cli.program import COMMANDS

ANSWER = "The answer is "


# One process for all commands: torch takes seconds to import.
RUN = """
import contextlib, io, json, sys
from verl_rollout_skip.cli import main
done = []
for command in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(command)
    done.append((code, printed.getvalue()))
print(json.dumps(done))
"""


@dataclass(frozen=True)
class Laptop:
    """A Python that sees only this package and its dependencies."""

    python: list[str]
    environment: dict[str, str]

    def run(self, *arguments: Any, code: int = 0) -> str:
        """Run a command, check its exit code, and return its output."""
        return self.run_all({"it": (code, *arguments)})["it"]

    def run_all(self, commands: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
        """Run several commands, each with its expected exit code, and return their output."""
        wanted = [[str(word) for word in words] for _, *words in commands.values()]
        command = [*self.python, "-c", RUN, json.dumps(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=200)
        assert (done.returncode, done.stderr) == (0, "")
        printed = {}
        for (name, (code, *_)), (found, text) in zip(commands.items(), json.loads(done.stdout), strict=True):
            assert found == code, f"{name}: exit code {found}\n{text}"
            printed[name] = text
        return printed


def declared_packages() -> Iterator[str]:
    """The names of the packages that pip would install with this package."""
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    pending = [Requirement(line) for line in settings["options"]["install_requires"].split("\n") if line]
    seen = set()
    while pending:
        wanted = pending.pop()
        name = canonicalize_name(wanted.name)
        if name in seen or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        yield name
        pending += [Requirement(text) for text in distribution(name).requires or ()]


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Laptop:
    """The quick form: a folder with links to the declared packages replaces site-packages."""
    site = tmp_path_factory.mktemp("site-packages")
    (site / "verl_rollout_skip").symlink_to(ROOT / "verl_rollout_skip")
    for name in declared_packages():
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(package.locate_file(top)))
    environment = {"PATH": os.environ["PATH"], "HOME": str(site), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return Laptop([sys.executable, "-S", "-P"], environment)


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with a tokenizer, but without its model."""
    folder = tmp_path_factory.mktemp("recorded")
    training, tokenizer = make_training(folder)
    inputs, texts, scores = conversation(1, 2, seed=1)
    with training.open("record", actor_rollout_ref__rollout__n=SAMPLES) as skip:
        for step, answers in ((1, texts), (2, texts[::-1])):
            output = encode(tokenizer, inputs, answers, scores)
            skip.step(RolloutKey(step), inputs, lambda _, output=output: output)
    shutil.rmtree(folder / "inputs")
    [made] = training.dumps.glob("*/*")
    write_examples(made, range(1, 3))
    return made


def copy_of(variant: Path, folder: Path) -> Path:
    return Path(shutil.copytree(variant, folder / "dumps" / variant.parent.name / variant.name))


def view_once(laptop: Laptop, variant: Path) -> None:
    """Start the server, wait for its URL, and stop it with SIGINT."""
    command = [*laptop.python, "-m", "verl_rollout_skip.cli", "view", str(variant), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=laptop.environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("http://127.0.0.1:")
        server.send_signal(signal.SIGINT)
        assert "Stopped." in server.stdout.read()
    assert server.returncode == 0


def use_every_command(laptop: Laptop, recorded: Path, folder: Path) -> None:
    variant = copy_of(recorded, folder)
    steps = [variant / f"step_{step:06d}" for step in (1, 2)]
    upstream = ROOT / "tests" / "upstream_dumps" / "verl-0.8.0"
    commands: dict[str, tuple[Any, ...]] = {
        "ls": (0, "ls", folder / "dumps"),
        "show": (0, "show", variant, "--row", 0),
        "stats": (0, "stats", variant),
        "report": (0, "report", variant, "-o", folder / "report.html"),
        "diff": (1, "diff", *steps),
        "audit": (1, "audit", variant, "-o", folder / "audit.html"),
        "mismatch": (2, "mismatch", variant),
        "verify": (0, "verify", folder / "dumps"),
        "resume": (2, "resume", variant, "--dry-run"),
        "export": (0, "export", variant, "-o", folder / "texts"),
        "export as a dataset": (2, "export", variant, "-o", folder / "dataset", "--format", "dataset"),
        "copy": (0, "copy", folder / "dumps", folder / "backup"),
        "import": (0, "import", upstream, folder / "imported", "--trust-pickle"),
        "pin": (0, "pin", variant, "--steps", 1),
        "pins": (0, "pins", variant),
        "unpin": (0, "unpin", variant, "--steps", 1),
        "prune": (0, "prune", variant, "--keep-last", 1, "--yes"),
        "completion": (0, "completion", "bash"),
    }
    assert {words[1] for words in commands.values()} | {"view"} == set(COMMANDS)
    view_once(laptop, variant)
    printed = laptop.run_all(commands)
    for command in ("show", "report", "diff"):
        assert "Token ids" not in printed[command]
    assert ANSWER in printed["show"]
    assert data_of(folder / "report.html")["head"]["has_tokenizer"]
    assert ANSWER in json.loads((folder / "texts" / "1.jsonl").read_text().splitlines()[0])["output"]
    assert "Resuming a training needs verl and ray, not installed here" in printed["resume"]
    assert "pip install datasets" in printed["export as a dataset"]


def test_every_command_works_with_what_the_package_declares(laptop: Laptop, variant: Path, tmp_path: Path) -> None:
    use_every_command(laptop, variant, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_works_with_the_installed_wheel(variant: Path, tmp_path: Path) -> None:
    """Installs the same torch build as the test environment, because the CUDA build is several gigabytes."""
    shutil.copytree(ROOT / "verl_rollout_skip", tmp_path / "source" / "verl_rollout_skip")
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    pip = [str(tmp_path / "env" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, tmp_path / "source"], check=True)
    subprocess.run([*pip, "install", f"torch=={version('torch').partition('+')[0]}"], check=True)
    [wheel] = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", wheel], check=True)
    listed = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    assert not [line for line in listed.splitlines() if line.startswith(("nvidia-", "verl==", "transformers", "ray="))]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    use_every_command(Laptop([str(tmp_path / "env" / "bin" / "python"), "-P"], environment), variant, tmp_path)
    program = [tmp_path / "env" / "bin" / "rollout-skip", "--version"]
    assert subprocess.run(program, check=True, capture_output=True, text=True).stdout.startswith("rollout-skip ")


@pytest.fixture
def special(variant: Path, tmp_path: Path) -> Path:
    """The recording with a tokenizer that only transformers can read, because another file adds a token."""
    copied = copy_of(variant, tmp_path)
    config = {"added_tokens_decoder": {"60000": {"content": "<extra>"}}}
    (copied / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    return copied


def test_the_reason_for_token_ids_is_correct(laptop: Laptop, special: Path, tmp_path: Path) -> None:
    printed = laptop.run_all(
        {
            "show": (0, "show", special),
            "report": (0, "report", special, "-o", tmp_path / "report.html"),
            "diff": (1, "diff", special / "step_000001", special / "step_000002"),
            "export": (2, "export", special, "-o", tmp_path / "texts"),
        }
    )
    for command, text in printed.items():
        assert f"The tokenizer in {special}/tokenizer cannot be used: " in text
        assert "it needs the package transformers, which is not installed (pip install transformers)." in text
        assert "Choose one with --tokenizer DIR." in text
        assert ("Token ids instead of text: " in text) == (command != "export")


def test_an_installation_without_dependencies_says_what_is_missing(
    laptop: Laptop, variant: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    shutil.copytree(laptop.environment["PYTHONPATH"], site, symlinks=True)
    (site / "tokenizers").unlink()
    incomplete = Laptop(laptop.python, {**laptop.environment, "PYTHONPATH": str(site)})
    printed = incomplete.run("report", variant, "-o", tmp_path / "report.html")
    assert f"The tokenizer in {variant}/tokenizer cannot be used: it needs the package tokenizers, which" in printed
    assert "is not installed (pip install tokenizers)." in printed


def test_clean_up_of_spaces_needs_transformers_only_where_it_has_an_effect(
    laptop: Laptop, variant: Path, tmp_path: Path
) -> None:
    """Llama's tokenizers set clean_up_tokenization_spaces, which has no effect for byte-pair encoding."""
    plain, words = copy_of(variant, tmp_path / "plain"), copy_of(variant, tmp_path / "words")
    for folder in (plain, words):
        (folder / "tokenizer" / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": true}')
    Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(str(words / "tokenizer" / "tokenizer.json"))
    printed = laptop.run_all(
        {folder.parts[-4]: (0, "report", folder, "-o", tmp_path / "report.html") for folder in (plain, words)}
    )
    assert "Token ids" not in printed["plain"]
    assert "pip install transformers" in printed["words"]
