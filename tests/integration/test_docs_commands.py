"""Every block of README.md, docs/ and the other documents is checked by a rule; a block that no rule knows fails.

``rollout-skip`` runs for real, on a recording that is made for it. Trainings are composed by hydra from the real
configuration files, and their settings are checked as a training checks them; nothing is started. Python blocks are run
by ``test_docs.py``, the sessions of docs/cli.md by ``test_cli_docs.py``, the quick start and the scenarios, trainings
included, by ``tests/e2e/test_scenarios.py``.
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
from verl_rollout_skip.cli import main as rollout_skip
from verl_rollout_skip.config import SkipConfig, run_name
from verl_rollout_skip.fingerprint import make_fingerprint
from verl_rollout_skip.outcome import Statistics

BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
TRAINING = re.compile(r"python -m (?P<module>[\w.]+)(?P<arguments>.*)")
COMMAND = re.compile(r"rollout-skip (?P<arguments>[^)>|]+)")
STEPS = range(1, 4)
RUN_END_TO_END = ("docs/quickstart.md", "docs/scenarios.md")


class Place:
    """A recording and the files that the documents speak of, under names of their own."""

    def __init__(self, folder: Path) -> None:
        training, tokenizer = make_training(folder)
        self.folder = folder
        self.variant = record_arithmetic(training, tokenizer, STEPS, prompts=2)
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
        }

    def fill_in(self, text: str) -> str:
        """A command of the documents with real paths."""
        pattern = "|".join(map(re.escape, sorted(self.words, key=len, reverse=True)))
        return re.sub(pattern, lambda match: str(self.words[match[0]]), text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("documents"))


@pytest.fixture(autouse=True)
def no_hydra_left() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_does_what_the_document_says(block: Block, place: Place, monkeypatch: Any, tmp_path: Path) -> None:
    if is_tested_elsewhere(block):
        return
    if block.language == "py":
        check_source(block, place, monkeypatch, tmp_path)
    elif block.language == "yaml":
        check_yaml(block, place)
    elif block.text.startswith(("<dump_dir>/", "/data/rollout_dumps/")):
        check_tree(block, place)
    elif block.text.startswith("[rollout_skip]"):
        check_log(block)
    else:
        assert block.language in ("text", "bash", "console"), f"{block}: no rule knows {block.language!r}"
        assert block.commands, f"{block}: no rule knows this block"
        for command in block.commands:
            check_command(block, command, place)


def test_a_block_that_no_rule_knows_fails(place: Place, monkeypatch: Any, tmp_path: Path) -> None:
    for language, text in (("text", "rm -rf something\n"), ("sql", "SELECT 1\n"), ("py", "unknown = 1\n")):
        block = Block("docs/new.md", 1, language, text, None)
        with pytest.raises(AssertionError, match="no rule"):
            test_a_block_does_what_the_document_says(block, place, monkeypatch, tmp_path)


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
def test_a_wrong_command_is_noticed(command: str, place: Place) -> None:
    block = Block("docs/new.md", 1, "text", command, None)
    with pytest.raises((Exception, SystemExit)):  # hydra and the checks have errors of their own
        check_command(block, block.commands[0], place)


def is_tested_elsewhere(block: Block) -> bool:
    return (
        block.language in ("python", "{toctree}", "none")  # none: a drawing
        or (block.language == "bash" and block.document in RUN_END_TO_END)
        or (block.language == "text" and block.before == "python")
        or (block.document == "docs/cli.md" and block.language == "console")
        or (block.document == "docs/format.md" and block.language == "json")
    )


# Commands


def check_command(block: Block, command: str, place: Place) -> None:
    training, started = TRAINING.search(command), COMMAND.search(command)
    if command == "pip install .":
        pass  # tests/integration/test_installed_alone.py does that
    elif command.startswith("make "):
        target = command.removeprefix("make ")
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
    elif training is not None:
        check_training(training["module"], training["arguments"].split(")")[0], place)
    elif started is not None:
        run_rollout_skip(place.fill_in(started["arguments"]))
    else:
        raise AssertionError(f"{block}: no rule knows {command!r}")


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


def check_training(module: str, arguments: str, place: Place) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    source = Path(str(spec.origin))
    entry = hydra_arguments(source.read_text(encoding="utf-8"))
    if entry is None:
        assert "__main__" in source.read_text(encoding="utf-8"), f"{module} cannot be run"
        return
    words = shlex.split(place.fill_in(arguments.replace("…", "").replace("[your settings]", "")))
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    overrides = [word for word in words if not word.startswith("--")]
    folder, name = source.parent / entry["config_path"], options.get("config-name", entry["config_name"])
    if "config-dir" in options:
        overrides.append(f"hydra.searchpath=[file://{folder}]")
        folder = ROOT / options["config-dir"]
    config = compose_training(folder, name, overrides, place)
    if "rollout_skip.mode" in arguments:
        check_settings(config, arguments)
    if module == "verl.trainer.main_ppo" and "trainer_mode" in arguments:
        from verl_rollout_skip.trainers.plugin import MODES

        assert config.trainer.use_v1
        assert config.trainer.v1.trainer_mode in MODES


def hydra_arguments(source: str) -> dict[str, str] | None:
    """What an entry point gives to ``hydra.main``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            return {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return None


def compose_training(folder: Path, name: str, overrides: list[str], place: Place) -> DictConfig:
    inputs = place.folder / "inputs"
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
    """As a training does before any worker starts."""
    settings = SkipConfig.from_config(config)
    assert f"rollout_skip.mode={settings.mode.value}" in arguments
    assert run_name(config)
    assert make_fingerprint(config).rollout


def check_yaml(block: Block, place: Place) -> None:
    recipe = "dapo" if block.document == "docs/dapo.md" else "ppo"
    config = compose_training(ROOT / "recipes" / recipe / "config", recipe, [], place)
    OmegaConf.set_struct(config, True)  # a key that is not there is an error
    merged = OmegaConf.merge(config, OmegaConf.create(place.fill_in(block.text)))
    assert isinstance(merged, DictConfig)
    SkipConfig.from_config(merged)


# Source, folders and logs


def check_source(block: Block, place: Place, monkeypatch: Any, folder: Path) -> None:
    """Source that would start a training, or that has names of the reader's own in it."""
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
        assert block.text.startswith("pl."), f"{block}: no rule knows this source"
        files = re.findall(r'"rollouts/(.+?)"', block.text)
        assert all(list(place.variant.glob(pattern)) for pattern in files)
        columns = re.findall(r'pl\.col\("(\w+)"\)', block.text)
        assert set(columns) <= set(pq.read_schema(part_file(place.variant)).names)


def run_entry_point(block: Block, monkeypatch: Any, folder: Path) -> None:
    """A whole entry point, with hydra and with verl's ``run_ppo`` as it can be called, but without Ray."""
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


def check_tree(block: Block, place: Place) -> None:
    for name in ("manifest.json", "trainings", "step_000001/gen_000.json"):
        assert name in block.text
        assert (place.variant / name).exists()
    digest, names = r"[0-9a-f]{32}", re.sub("[{<]digest[}>]", "0" * 32, block.text)
    assert re.search(rf"step_000001/gen_000\.{digest}\.parquet", names)
    assert re.fullmatch(rf"gen_000\.{digest}\.parquet", part_file(place.variant).name)


def check_log(block: Block) -> None:
    """The summary at the end of a training, whatever its numbers."""
    text = block.text.strip()
    _, _, notes = text.rpartition("failed; ")
    said = f"[rollout_skip] INFO: {Statistics(notes=[notes]).summary(0)}"
    assert without_numbers(text) == without_numbers(said)
    assert without_numbers(notes) in {message.replace("…", "N") for message in messages()}


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", text)
