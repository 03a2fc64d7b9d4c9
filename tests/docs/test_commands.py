"""Checks every code block in the documentation with a rule. A block without a rule fails.

``rollout-skip`` commands run on a test recording. For training commands, hydra composes the real configuration and the
settings are checked, but nothing is started. Other tests cover the Python blocks (``test_examples.py``), commands with
their output (``tests/cli/test_docs.py``), and pages that run with their trainings (``tests/e2e/test_scenarios.py``).
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from tests.arithmetic_run import make_training
from tests.arithmetic_run import record as record_arithmetic
from tests.documents import DOCUMENTS, ROOT, Block, blocks_of, messages
from tests.entry_files import part_file
from tests.training_columns import add_columns
from tests.written_ledgers import RECORDING, REPLAY
from tests.written_ledgers import write as write_ledger
from verl_rollout_skip.cli import main as rollout_skip
from verl_rollout_skip.config.run_names import run_name
from verl_rollout_skip.config.skip_config import SkipConfig
from verl_rollout_skip.fingerprint.fingerprint import make_fingerprint
from verl_rollout_skip.replay.statistics import Statistics

BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
TRAINING = re.compile(r"python -m (?P<module>[\w.]+)(?P<arguments>.*)")
COMMAND = re.compile(r"rollout-skip (?P<arguments>[^)>|]+)")
STEPS = range(1, 4)
RUN_END_TO_END = ("docs/quickstart.md", "docs/regression-tests.md", "docs/scenarios.md")
WITH_OUTPUT = ("docs/audit.md", "docs/cli.md", "docs/mismatch.md")


class Workspace:
    """A recording and the files that the documents mention, under temporary paths."""

    def __init__(self, folder: Path) -> None:
        training, tokenizer = make_training(folder)
        self.folder = folder
        self.variant = record_arithmetic(training, tokenizer, STEPS, prompts=2)
        write_ledger(self.variant, RECORDING, STEPS)
        write_ledger(self.variant, REPLAY, STEPS, RECORDING)
        add_columns(self.variant)
        inputs = folder / "inputs"
        (folder / "empty").mkdir()
        self.words = {
            "/data/dumps/RUN/VARIANT": self.variant,
            "/data/rollout_dumps": folder / "empty",
            "/data/dumps": training.dumps,
            "/tmp/assets": folder / "assets",
            "/abs/path": folder / "empty",
            "MANIFEST": self.variant / "manifest.json",
            "/new/model": inputs / "model",
            "/new/train.parquet": inputs / "train.parquet",
            "report.html": folder / "report.html",
            "audit.html": folder / "audit.html",
            "/backup/dumps": folder / "backup",
        }

    def fill_in(self, text: str) -> str:
        """Replace the paths in a command by real ones."""
        pattern = "|".join(map(re.escape, sorted(self.words, key=len, reverse=True)))
        return re.sub(pattern, lambda match: str(self.words[match[0]]), text)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("documents"))


@pytest.fixture(autouse=True)
def no_hydra_left() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_code_block_is_valid(block: Block, workspace: Workspace, monkeypatch: Any, tmp_path: Path) -> None:
    if is_tested_elsewhere(block):
        return
    if block.language == "py":
        check_source(block, workspace, monkeypatch, tmp_path)
    elif block.language == "yaml":
        check_yaml(block, workspace)
    elif block.text.startswith(("<dump_dir>/", "/data/rollout_dumps/")):
        check_tree(block, workspace)
    elif block.text.startswith("[rollout_skip]"):
        check_log(block)
    else:
        assert block.language in ("text", "bash", "console"), f"{block}: no rule for {block.language!r}"
        assert block.commands, f"{block}: no rule for this block"
        for command in block.commands:
            check_command(block, command, workspace)


def test_a_block_without_a_rule_fails(workspace: Workspace, monkeypatch: Any, tmp_path: Path) -> None:
    for language, text in (("text", "rm -rf something\n"), ("sql", "SELECT 1\n"), ("py", "unknown = 1\n")):
        block = Block("docs/new.md", 1, language, text, None)
        with pytest.raises(AssertionError, match="no rule"):
            test_every_code_block_is_valid(block, workspace, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "rollout-skip show /data/dumps/RUN/VARIANT --step 70",
        "rollout-skip export /data/dumps --no-such-option",
        "python -m recipes.ppo.main_ppo … rollout_skip.mod=cache",
        "python -m recipes.ppo.main_ppo … rollout_skip.mode=chache rollout_skip.dump_dir=/data/dumps",
        "python -m verl.trainer.main_ppo trainer.v1.trainer_mode=skip_snyc +rollout_skip.mode=cache",
        "python -m recipes.no_such_thing",
        "make no-such-target",
    ],
)
def test_a_wrong_command_is_detected(command: str, workspace: Workspace) -> None:
    block = Block("docs/new.md", 1, "text", command, None)
    with pytest.raises((Exception, SystemExit)):  # hydra and each check raise their own errors
        check_command(block, block.commands[0], workspace)


def is_tested_elsewhere(block: Block) -> bool:
    return (
        block.language in ("python", "{toctree}", "none")  # none: a drawing
        or (block.language == "bash" and block.document in RUN_END_TO_END)
        or (block.language == "text" and block.before == "python")
        or (block.document in WITH_OUTPUT and block.language == "console")
        or (block.document == "docs/format.md" and block.language == "json")
    )


# Commands


def check_command(block: Block, command: str, workspace: Workspace) -> None:
    training, started = TRAINING.search(command), COMMAND.search(command)
    if command == "pip install .":
        pass  # tests/cli/test_installed_alone.py does that
    elif command.startswith("make "):
        target = command.removeprefix("make ")
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
    elif training is not None:
        check_training(training["module"], training["arguments"].split(")")[0], workspace)
    elif started is not None:
        run_rollout_skip(workspace.fill_in(started["arguments"]))
    else:
        raise AssertionError(f"{block}: no rule for {command!r}")


def run_rollout_skip(arguments: str) -> None:
    words = shlex.split(arguments.rstrip('"'))
    if words[0] == "view":
        check_view(words)
        return
    if words[0] == "resume" and "--dry-run" not in words:
        words.append("--dry-run")
    assert rollout_skip(words) == 0, arguments


def check_view(words: list[str]) -> None:
    if "--port" in words:
        words[words.index("--port") + 1] = "0"  # the one in the document may be taken
    command = [sys.executable, "-m", "verl_rollout_skip.cli", *words]
    command += [] if "--no-browser" in words else ["--no-browser"]
    server = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\S{40,}/\n", server.stdout.readline())
    finally:
        server.terminate()
        server.communicate()


# Trainings


def check_training(module: str, arguments: str, workspace: Workspace) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    source = Path(str(spec.origin))
    entry = hydra_arguments(source.read_text(encoding="utf-8"))
    if entry is None:
        assert "__main__" in source.read_text(encoding="utf-8"), f"{module} cannot be run"
        return
    words = shlex.split(workspace.fill_in(arguments.replace("…", "").replace("[your settings]", "")))
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    overrides = [word for word in words if not word.startswith("--")]
    folder, name = source.parent / entry["config_path"], options.get("config-name", entry["config_name"])
    if "config-dir" in options:
        overrides.append(f"hydra.searchpath=[file://{folder}]")
        folder = ROOT / options["config-dir"]
    config = compose_training(folder, name, overrides, workspace)
    if "rollout_skip.mode" in arguments:
        check_settings(config, arguments)
    if module == "verl.trainer.main_ppo" and "trainer_mode" in arguments:
        from verl_rollout_skip.trainers.plugin import MODES

        assert config.trainer.use_v1
        assert config.trainer.v1.trainer_mode in MODES


def hydra_arguments(source: str) -> dict[str, str] | None:
    """The arguments that an entry point passes to ``hydra.main``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            return {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return None


def compose_training(folder: Path, name: str, overrides: list[str], workspace: Workspace) -> DictConfig:
    inputs = workspace.folder / "inputs"
    needed = {
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.model.path": inputs / "model",
        "data.train_files": inputs / "train.parquet",
        "data.val_files": inputs / "train.parquet",
    }
    given = {word.split("=")[0] for word in overrides}
    more = [f"{key}={value}" for key, value in needed.items() if key not in given and not name.startswith("cpu")]
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose(name, overrides=[*more, *overrides])


def check_settings(config: DictConfig, arguments: str) -> None:
    """Check settings as a training does before any worker starts."""
    settings = SkipConfig.from_config(config)
    assert f"rollout_skip.mode={settings.mode.value}" in arguments
    assert run_name(config)
    assert make_fingerprint(config).rollout


def check_yaml(block: Block, workspace: Workspace) -> None:
    recipe = "dapo" if block.document == "docs/dapo.md" else "ppo"
    config = compose_training(ROOT / "recipes" / recipe / "config", recipe, [], workspace)
    OmegaConf.set_struct(config, True)  # a key that is not there is an error
    merged = OmegaConf.merge(config, OmegaConf.create(workspace.fill_in(block.text)))
    assert isinstance(merged, DictConfig)
    SkipConfig.from_config(merged)


# Source, folders and logs


def check_source(block: Block, workspace: Workspace, monkeypatch: Any, folder: Path) -> None:
    """Check source code that would start a training or that contains placeholder names."""
    compile(block.text, str(block), "exec")
    if "hydra.main" in block.text:
        run_entry_point(block, monkeypatch, folder)
    elif "YourTrainer" in block.text:
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        exec(block.text, {"YourTrainer": RayPPOTrainer})
    elif "register_trainer" in block.text:
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

        before = dict(TRAINER_REGISTRY)
        try:
            exec(block.text, {})
            assert set(TRAINER_REGISTRY) - set(before) == {"my_mode"}
        finally:
            TRAINER_REGISTRY.clear()
            TRAINER_REGISTRY.update(before)
    else:
        assert block.text.startswith("pl."), f"{block}: no rule for this source"
        files = re.findall(r'"rollouts/(.+?)"', block.text)
        assert all(list(workspace.variant.glob(pattern)) for pattern in files)
        columns = re.findall(r'pl\.col\("(\w+)"\)', block.text)
        assert set(columns) <= set(pq.read_schema(part_file(workspace.variant)).names)


def run_entry_point(block: Block, monkeypatch: Any, folder: Path) -> None:
    """Run a whole entry point with hydra and the signature of verl's ``run_ppo``, but without Ray."""
    from verl.trainer import main_ppo

    run_ppo = create_autospec(main_ppo.run_ppo)
    monkeypatch.setattr(main_ppo, "run_ppo", run_ppo)
    monkeypatch.chdir(folder)
    settings = [
        *("actor_rollout_ref.rollout.name=vllm", "trainer.use_v1=False"),
        *("+rollout_skip.mode=cache", f"+rollout_skip.dump_dir={folder}"),
    ]
    monkeypatch.setattr(sys, "argv", ["entry.py", *settings, f"hydra.run.dir={folder}"])
    script = folder / "entry.py"
    script.write_text(block.text, encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    run_ppo.assert_called_once()
    bound = inspect.signature(main_ppo.run_ppo).bind(*run_ppo.call_args.args, **run_ppo.call_args.kwargs)
    assert SkipConfig.from_config(bound.arguments["config"]).dump_dir == str(folder)


def check_tree(block: Block, workspace: Workspace) -> None:
    for name in ("manifest.json", "trainings", "step_000001/gen_000.json"):
        assert name in block.text
        assert (workspace.variant / name).exists()
    digest, names = r"[0-9a-f]{32}", re.sub("[{<]digest[}>]", "0" * 32, block.text)
    assert re.search(rf"step_000001/gen_000\.{digest}\.parquet", names)
    assert re.fullmatch(rf"gen_000\.{digest}\.parquet", part_file(workspace.variant).name)


def check_log(block: Block) -> None:
    """Check the summary at the end of a training, ignoring its numbers."""
    text = block.text.strip()
    _, _, notes = text.rpartition("failed; ")
    expected = f"[rollout_skip] INFO: {Statistics(notes=[notes]).summary(0)}"
    assert without_numbers(text) == without_numbers(expected)
    assert without_numbers(notes) in {message.replace("…", "N") for message in messages()}


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", text)
