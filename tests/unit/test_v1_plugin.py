"""The plugin that verl loads everywhere: registers late, and lets nothing be skipped silently."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip.errors import InertError
from verl_rollout_skip.v1 import plugin

TRAINERS = "trainers_of_a_test"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that can be imported, and is forgotten afterwards."""
    folder = tmp_path / TRAINERS
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "v1.py").write_text(
        "names = ['sync']\nif __name__ == '__main__':\n    print('run as a program', names)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith(TRAINERS)]:
        del sys.modules[name]


def config(**changes: Any) -> DictConfig:
    settings = {
        "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
        "rollout_skip": {"mode": "cache", "dump_dir": "/tmp"},
    }
    return OmegaConf.merge(OmegaConf.create(settings), OmegaConf.create(changes))


def test_a_function_is_called_when_a_module_is_imported_and_not_before(package: Path) -> None:
    found: list[Any] = []
    plugin.call_after_import(f"{TRAINERS}.v1", lambda module: found.append(module.names))
    importlib.import_module(TRAINERS)
    assert found == []
    module = importlib.import_module(f"{TRAINERS}.v1")
    assert found == [["sync"]]
    assert importlib.reload(module) is module, "the module is an ordinary one"
    assert found == [["sync"]]


def test_a_module_that_is_imported_already_is_taken_at_once(package: Path) -> None:
    found: list[ModuleType] = []
    module = importlib.import_module(f"{TRAINERS}.v1")
    plugin.call_after_import(f"{TRAINERS}.v1", found.append)
    assert found == [module]


def test_a_module_that_is_watched_can_be_looked_up_and_run_as_a_program(package: Path) -> None:
    script = (
        "import runpy, importlib.util\n"
        "from verl_rollout_skip.v1 import plugin\n"
        f"plugin.call_after_import('{TRAINERS}.v1', lambda module: print('imported', module.names))\n"
        f"assert importlib.util.find_spec('{TRAINERS}.v1').origin.endswith('v1.py')\n"
        f"runpy.run_module('{TRAINERS}.v1', run_name='__main__')\n"
        f"import {TRAINERS}.v1\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=package, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["run as a program ['sync']", "imported ['sync']"]


def test_loading_the_plugin_imports_neither_verl_nor_torch() -> None:
    script = "import sys, verl_rollout_skip.v1.plugin; print([m for m in ('verl', 'torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Trainer:
    """Stands for verl's trainer: what counts is how it is made."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config


@pytest.fixture
def guarded() -> type:
    kind = type("PPOTrainerSync", (Trainer,), {"__init__": Trainer.__init__})
    plugin.guard_trainer(kind)
    return kind


def test_a_trainer_without_recorded_rollouts_refuses_a_configuration_that_asks_for_them(guarded: type) -> None:
    with pytest.raises(InertError, match=r"mode is 'cache', and PPOTrainerSync knows .*trainer_mode=skip_sync\."):
        guarded(config=config())
    with pytest.raises(InertError, match="skip_sync or skip_colocate_async or skip_separate_async"):
        guarded(config(trainer={"v1": {"trainer_mode": "mine"}}))
    with pytest.raises(InertError, match="Use recipes/ppo"):
        guarded(config(trainer={"use_v1": False}))


def test_the_key_that_users_know_is_not_silently_inert_either(guarded: type) -> None:
    old = {"rollout": {"skip_rollout": True, "skip_dump_dir": "/tmp"}}
    with pytest.raises(InertError, match="nothing would be recorded"):
        guarded(config(rollout_skip={"mode": "off", "dump_dir": None}, actor_rollout_ref=old))


def test_other_trainings_and_trainers_with_recorded_rollouts_are_left_alone(guarded: type) -> None:
    assert guarded(config(rollout_skip={"mode": "off"})).config is not None
    skipping = type("Skipping", (guarded,), {"rollout_skip": object()})
    assert skipping(config=config()).config is not None


def test_the_fully_asynchronous_trainer_is_refused_before_ray_starts() -> None:
    started: list[DictConfig] = []
    main_ppo = SimpleNamespace(run_ppo=lambda config, task_runner_class: started.append(config))
    plugin.guard_fully_async(main_ppo)
    with pytest.raises(InertError, match=r"fully_async_policy knows nothing .*skip_separate_async"):
        main_ppo.run_ppo(config(async_training={"staleness_threshold": 0.1}), task_runner_class=object)
    assert started == []
    main_ppo.run_ppo(config(), task_runner_class=object)
    assert len(started) == 1


def test_trainers_that_cannot_be_imported_say_so_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import PPOTrainer  # abstract, so that Python has complaints of its own

    registered: dict[str, Any] = {}
    monkeypatch.setattr(PPOTrainer, "__init__", PPOTrainer.__init__)
    verl = SimpleNamespace(
        PPOTrainer=PPOTrainer, register_trainer=lambda name: lambda kind: registered.setdefault(name, kind)
    )
    monkeypatch.setitem(sys.modules, "verl_rollout_skip.v1.trainers", None)
    plugin.register_trainers(verl)  # type: ignore[arg-type]
    assert list(registered) == ["skip_sync", "skip_colocate_async", "skip_separate_async"]
    with pytest.raises(ImportError, match=r"trainer_mode=skip_sync cannot be used, because verl_rollout_skip\.v1"):
        registered["skip_sync"](config=config())
