"""The plugin that verl loads in every process: it affects only trainings that ask for recorded rollouts."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip.errors import ConfigError, InertError
from verl_rollout_skip.trainers import import_hook, plugin

TRAINERS = "trainers_of_a_test"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that can be imported, and is removed afterwards."""
    folder = tmp_path / TRAINERS
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "v1.py").write_text(
        "names = ['sync']\nif __name__ == '__main__':\n    print('run as a program', names)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    import_hook._watcher.calls.pop(f"{TRAINERS}.v1", None)
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
    import_hook.call_after_import(f"{TRAINERS}.v1", lambda module: found.append(module.names))
    importlib.import_module(TRAINERS)
    assert found == []
    module = importlib.import_module(f"{TRAINERS}.v1")
    assert found == [["sync"]]
    assert importlib.reload(module) is module, "the module is an ordinary one"
    assert found == [["sync"]]


def test_the_function_is_called_immediately_for_a_module_that_is_already_imported(package: Path) -> None:
    found: list[ModuleType] = []
    module = importlib.import_module(f"{TRAINERS}.v1")
    import_hook.call_after_import(f"{TRAINERS}.v1", found.append)
    assert found == [module]


def test_the_function_is_called_when_a_module_is_imported_after_a_failed_attempt(package: Path) -> None:
    found: list[Any] = []
    import_hook.call_after_import(f"{TRAINERS}.v1", lambda module: found.append(module.names))
    file = package / TRAINERS / "v1.py"
    works = file.read_text()
    file.write_text("import something_that_is_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_installed"):
        importlib.import_module(f"{TRAINERS}.v1")
    file.write_text(works)
    importlib.invalidate_caches()
    importlib.import_module(f"{TRAINERS}.v1")
    assert found == [["sync"]]


@pytest.mark.parametrize("is_imported", [False, True])
def test_the_spec_of_a_watched_module_can_be_copied_and_pickled(package: Path, is_imported: bool) -> None:
    import_hook.call_after_import(f"{TRAINERS}.v1", lambda module: None)
    spec = importlib.util.find_spec(f"{TRAINERS}.v1")
    if is_imported:
        spec = importlib.import_module(f"{TRAINERS}.v1").__spec__
    assert spec is not None
    for same in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert (same.name, same.origin) == (spec.name, spec.origin)
        assert same.loader.get_source(spec.name).startswith("names = ['sync']")
        assert importlib.util.module_from_spec(same).__name__ == spec.name


def test_an_imported_module_keeps_its_original_loader(package: Path) -> None:
    plain = importlib.import_module(TRAINERS).__loader__
    import_hook.call_after_import(f"{TRAINERS}.v1", lambda module: None)
    loader = importlib.import_module(f"{TRAINERS}.v1").__loader__
    assert type(loader) is type(plain)
    assert vars(loader).keys() == vars(plain).keys()


def test_a_watched_module_can_be_found_and_run_as_a_program(package: Path) -> None:
    script = (
        "import runpy, importlib.util\n"
        "from verl_rollout_skip.trainers import import_hook\n"
        f"import_hook.call_after_import('{TRAINERS}.v1', lambda module: print('imported', module.names))\n"
        f"assert importlib.util.find_spec('{TRAINERS}.v1').origin.endswith('v1.py')\n"
        f"runpy.run_module('{TRAINERS}.v1', run_name='__main__')\n"
        f"import {TRAINERS}.v1\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=package, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["run as a program ['sync']", "imported ['sync']"]


@pytest.mark.parametrize("path", ["verl_rollout_skip.trainers.plugin", "verl_rollout_skip.v1.plugin"])
def test_loading_the_plugin_imports_neither_verl_nor_torch(path: str) -> None:
    """The second path is the entry point of older installations."""
    script = (
        f"import sys, {path}; print([m for m in ('verl', 'torch', 'ray') if m in sys.modules], "
        "'verl_rollout_skip.trainers.plugin' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"


class Trainer:
    """Replaces verl's trainer; only its constructor matters."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config


def guarded(name: str = "PPOTrainerSync", advise: plugin.Advise = plugin._advise_v1) -> Any:
    kind = type(name, (Trainer,), {"__init__": Trainer.__init__})
    plugin.guard_trainer(kind, advise)
    return kind


def v0_trainer(name: str = "RayPPOTrainer") -> Any:
    """The class in ``verl.trainer.ppo.ray_trainer`` after its import, or a class derived from it."""
    module = SimpleNamespace(RayPPOTrainer=type("RayPPOTrainer", (Trainer,), {"__init__": Trainer.__init__}))
    plugin.guard_v0(module)
    return module.RayPPOTrainer if name == "RayPPOTrainer" else type(name, (module.RayPPOTrainer,), {})


def test_a_trainer_of_verl_rejects_a_configuration_that_asks_for_recorded_rollouts() -> None:
    with pytest.raises(InertError, match=r"mode is 'cache', but PPOTrainerSync does not .*trainer_mode=skip_sync\."):
        guarded()(config=config())
    with pytest.raises(InertError, match=r"skip_separate_async, or write class MyTrainer\(RolloutSkipMixin, Mine\)"):
        guarded("Mine")(config(trainer={"v1": {"trainer_mode": "mine"}}))
    with pytest.raises(InertError, match="trainer_mode=skip_sync or skip_colocate_async"):
        guarded()(OmegaConf.create({"rollout_skip": {"mode": "cache", "dump_dir": "/tmp"}}))


@pytest.mark.parametrize("use_v1", [True, False])
def test_the_advice_for_a_v0_recipe_is_the_mixin_not_a_v1_mode(use_v1: bool) -> None:
    with pytest.raises(InertError, match=r"Use recipes/ppo .*\(RolloutSkipMixin, RayDAPOTrainer\)") as refused:
        v0_trainer("RayDAPOTrainer")(config(trainer={"use_v1": use_v1}))
    assert "trainer_mode" not in str(refused.value)


def test_the_old_key_skip_rollout_is_not_silently_ignored_either() -> None:
    old = {"rollout": {"skip_rollout": True, "skip_dump_dir": "/tmp"}}
    with pytest.raises(InertError, match="nothing would be recorded"):
        guarded()(config(rollout_skip={"mode": "off", "dump_dir": None}, actor_rollout_ref=old))
    with pytest.raises(InertError, match="nothing would be recorded"):
        v0_trainer()(OmegaConf.create({"actor_rollout_ref": old}))


def test_a_misspelled_block_is_not_silently_ignored_either() -> None:
    asked = OmegaConf.create({"trainer": {}, "rolout_skip": {"mode": "cache", "dump_dir": "/tmp"}})
    for make in (guarded, v0_trainer):
        with pytest.raises(ConfigError, match="Nothing reads rolout_skip: did you mean 'rollout_skip'"):
            make()(asked)


def test_other_trainings_and_trainers_with_recorded_rollouts_are_left_alone() -> None:
    trainer = guarded()
    assert trainer(config(rollout_skip={"mode": "off"})).config is not None
    skipping = type("Skipping", (trainer,), {"rollout_skip": object()})
    assert skipping(config=config()).config is not None


@pytest.mark.parametrize(
    "given",
    [
        OmegaConf.create({"trainer": {"use_v1": True}}),
        OmegaConf.create({"trainer": {}}),
        OmegaConf.create({"actor_rollout_ref": {"rollout": "${somewhere.else}"}}),
        OmegaConf.create({"actor_rollout_ref": "???"}),
        {"trainer": {"use_v1": False}},
        SimpleNamespace(trainer=None),
        None,
    ],
)
@pytest.mark.parametrize("make", [guarded, v0_trainer])
def test_trainings_that_do_not_ask_for_recorded_rollouts_are_not_affected(make: Any, given: Any) -> None:
    assert make()(given).config is given
    assert make()(config=given).config is given
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'config'"):
        make()()


def test_a_verl_with_a_different_structure_can_be_imported() -> None:
    """Its modules have the same names, but lack everything that the plugin looks for."""
    for notice in (plugin.offer_trainers, plugin.guard_v0, plugin.guard_fully_async):
        module = SimpleNamespace()
        notice(module)
        assert vars(module) == {}
    factory = SimpleNamespace(PPOTrainer=lambda config: config, RayPPOTrainer=None)
    plugin.offer_trainers(factory)
    plugin.guard_v0(factory)
    assert factory.PPOTrainer(config()) == config()


def test_the_fully_asynchronous_trainer_is_rejected_before_ray_starts() -> None:
    started: list[DictConfig] = []
    main_ppo = SimpleNamespace(run_ppo=lambda config, task_runner_class: started.append(config))
    plugin.guard_fully_async(main_ppo)
    with pytest.raises(InertError, match=r"fully_async_policy does not support .*skip_separate_async"):
        main_ppo.run_ppo(config(async_training={"staleness_threshold": 0.1}), task_runner_class=object)
    assert started == []
    main_ppo.run_ppo(config(), task_runner_class=object)
    main_ppo.run_ppo(config=SimpleNamespace(), task_runner_class=object)
    assert len(started) == 2


def test_trainers_that_cannot_be_imported_give_the_reason_when_they_are_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verl = SimpleNamespace(PPOTrainer=None, get_trainer_cls=lambda name: f"the trainer {name}")
    plugin.offer_trainers(verl)
    monkeypatch.setitem(sys.modules, "verl_rollout_skip.trainers.v1.trainers", None)
    assert verl.get_trainer_cls("sync") == "the trainer sync"
    with pytest.raises(ImportError, match=r"trainer_mode=skip_sync cannot be used, because verl_rollout_skip\.v1"):
        verl.get_trainer_cls("skip_sync")


def test_importing_the_mixin_does_not_import_verl() -> None:
    """verl imports plugins and user modules while it is imported itself; they would find half of the mixin."""
    script = (
        "import sys, verl_rollout_skip.trainers.v1.mixin\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'verl'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
