"""A training without matching rollouts logs where similar recordings are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.trainings import RUN_NAME, Engine, Training, contents, inputs_of, never
from verl_rollout_skip import RolloutKey
from verl_rollout_skip.errors import ConfigError, EntryNotFoundError
from verl_rollout_skip.store.storage.local import LocalStorage

K1 = RolloutKey(1)
TEMPERATURE = "actor_rollout_ref__rollout__temperature"
LATER = {"trainer__experiment_name": "exp-20261118"}


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


@pytest.fixture(params=["local", "memory"])
def dump_dir(request: pytest.FixtureRequest, training: Training) -> Any:
    if request.param == "local":
        yield str(training.dumps)
        return
    url = f"memory://{training.folder.name}/dumps"
    yield url
    store = fsspec.filesystem("memory").store
    for path in [path for path in store if path.startswith(f"/{training.folder.name}/")]:
        del store[path]


def log_of(training: Training, caplog: Any, mode: str, skip: dict[str, Any] | None = None, **changes: Any) -> str:
    """The log of a training that starts in a mode that generates missing steps."""
    caplog.clear()
    caplog.set_level(logging.INFO)
    with training.open(mode, skip, **changes):
        return caplog.text


def replay_error(training: Training, error: type[Exception], skip: dict[str, Any] | None = None, **changes: Any) -> str:
    """The error message of a replay."""
    with pytest.raises(error) as caught:
        training.open("replay", skip, **changes)
    return str(caught.value)


def test_matching_rollouts_under_another_experiment_name_are_named(
    training: Training, caplog: Any, dump_dir: str
) -> None:
    skip = {"dump_dir": dump_dir}
    training.record(K1, skip=skip, **{TEMPERATURE: 0.7})
    training.record(K1, skip=skip)
    for text in (
        log_of(training, caplog, "cache", skip, **LATER),
        replay_error(training, EntryNotFoundError, skip, **LATER),
    ):
        assert "contains rollouts with the current settings" in text
        assert "trainer.experiment_name=exp trainer.project_name=proj" in text
        assert "temperature" not in text, "differences are not shown if there is a match"
    source = text.split("rollout_skip.source=")[1].split()[0].rstrip(",")
    with training.open("cache", {**skip, "source": source}, **LATER) as skipping:
        assert skipping.step(K1, inputs_of(K1), never).hit


def test_changed_n_is_named_in_cache_and_in_replay(training: Training, caplog: Any, dump_dir: str) -> None:
    skip = {"dump_dir": dump_dir}
    training.record(K1, skip=skip)
    for text in (
        log_of(training, caplog, "cache", skip, actor_rollout_ref__rollout__n=4),
        replay_error(training, EntryNotFoundError, skip, actor_rollout_ref__rollout__n=4),
    ):
        assert "actor_rollout_ref.rollout.n: 2 → 4" in text
        assert f"{dump_dir}/{RUN_NAME}/" in text


def test_most_similar_variant_is_listed_first_regardless_of_its_run(training: Training, caplog: Any) -> None:
    training.record(K1, **{TEMPERATURE: 0.5, "data__seed": 3})
    training.record(K1, **{TEMPERATURE: 0.6}, trainer__experiment_name="another")
    text = log_of(training, caplog, "cache")
    assert text.index("temperature: 0.6 → 1.0") < text.index("temperature: 0.5 → 1.0")


def test_first_training_logs_no_neighbors(training: Training, caplog: Any, dump_dir: str) -> None:
    assert "contains" not in log_of(training, caplog, "cache", {"dump_dir": dump_dir})


def test_recording_that_continues_logs_no_neighbors(training: Training, caplog: Any) -> None:
    training.record(K1)
    training.record(K1, **LATER)
    assert RUN_NAME not in log_of(training, caplog, "cache", **LATER)


def test_search_is_bounded_with_many_runs(training: Training, monkeypatch: Any, caplog: Any) -> None:
    training.record(K1, **{TEMPERATURE: 0.7})
    for number in range(300):
        (training.dumps / RUN_NAME.replace("exp", f"exp-{number}") / "0123456789ab").mkdir(parents=True)
    read: list[str] = []
    plain = LocalStorage.read

    def counting(self: LocalStorage, folder: str, name: str, limit: int) -> bytes:
        read.append(self.where(folder, name))
        return plain(self, folder, name, limit)

    monkeypatch.setattr(LocalStorage, "read", counting)
    text = log_of(training, caplog, "cache", trainer__experiment_name="exp2")
    assert "temperature: 0.7 → 1.0" in text
    assert len(read) < 150


def test_unreadable_dump_dir_is_reported(training: Training, monkeypatch: Any, caplog: Any) -> None:
    training.record(K1)
    plain = LocalStorage.folders

    def folders(self: LocalStorage) -> Any:
        if self.root == training.dumps:
            raise PermissionError(13, "Permission denied", str(self.root))
        return plain(self)

    monkeypatch.setattr(LocalStorage, "folders", folders)
    assert "Permission denied" in log_of(training, caplog, "cache", **LATER)
    assert "Permission denied" in replay_error(training, EntryNotFoundError, **LATER)


def test_slow_object_store_does_not_delay_the_start(training: Training, monkeypatch: Any, caplog: Any) -> None:
    training.record(K1)
    monkeypatch.setattr("verl_rollout_skip.runs.neighbors._SECONDS", 0.0)
    assert RUN_NAME not in log_of(training, caplog, "cache", **LATER)


@pytest.mark.parametrize("wrong", ["{}/dmps", "{}/dumps_", "{}/Dumps/"])
def test_misspelled_dump_dir_is_reported(training: Training, caplog: Any, wrong: str, dump_dir: str) -> None:
    parent = dump_dir.rpartition("/")[0]
    training.record(K1, skip={"dump_dir": dump_dir})
    skip = {"dump_dir": wrong.format(parent)}
    for text in (log_of(training, caplog, "cache", skip), replay_error(training, EntryNotFoundError, skip)):
        assert f"next to it {dump_dir} does: rollout_skip.dump_dir={dump_dir}" in text


def test_misspelled_parent_of_dump_dir_is_reported(training: Training, caplog: Any, dump_dir: str) -> None:
    parent = dump_dir.rpartition("/")[0]
    training.record(K1, skip={"dump_dir": f"{dump_dir}/mine/all"})
    text = log_of(training, caplog, "cache", {"dump_dir": f"{parent}/dumsp/mine/all"})
    assert f"rollout_skip.dump_dir={dump_dir}/mine/all" in text


def test_dump_dir_one_level_too_high_is_reported(training: Training, caplog: Any, dump_dir: str) -> None:
    training.record(K1, skip={"dump_dir": dump_dir})
    skip = {"dump_dir": dump_dir.rpartition("/")[0]}
    for text in (log_of(training, caplog, "cache", skip), replay_error(training, EntryNotFoundError, skip)):
        assert f"inside it {dump_dir} does: rollout_skip.dump_dir={dump_dir}" in text


@pytest.mark.parametrize("mode", ["record", "replay"])
@pytest.mark.parametrize("level", ["run", "variant", "step"])
def test_dump_dir_that_is_a_run_or_a_variant_is_an_error(
    training: Training, dump_dir: str, mode: str, level: str
) -> None:
    training.record(K1, skip={"dump_dir": dump_dir})
    with training.open("replay", {"dump_dir": dump_dir}) as replay:
        variant = replay.sources[0].folder
    wrong = {"run": f"{dump_dir}/{RUN_NAME}", "variant": variant, "step": f"{variant}/step_000001"}[level]
    with pytest.raises(ConfigError, match=f"(is|inside) the run folder {RUN_NAME}.*dump_dir={dump_dir}$"):
        training.open(mode, {"dump_dir": wrong})


def test_variant_outside_a_run_cannot_be_a_dump_dir_but_a_source(training: Training, tmp_path: Path) -> None:
    training.record(K1)
    alone = training.variants()[0].rename(tmp_path / "alone")
    before = contents(alone)
    with pytest.raises(ConfigError, match=rf"is a variant folder: .*rollout_skip\.source={alone}"):
        training.open("cache", {"dump_dir": str(alone)})
    assert contents(alone) == before
    skip = {"source": str(alone), "dump_dir": str(tmp_path / "new")}
    with training.open("cache", skip) as skipping:
        assert skipping.step(K1, inputs_of(K1), never).hit


def test_dump_dir_with_the_name_of_a_run_still_works(training: Training) -> None:
    skip = {"dump_dir": str(training.dumps / RUN_NAME)}
    for hit in (False, True):
        with training.open("cache", skip) as skipping:
            assert skipping.step(K1, inputs_of(K1), Engine()).hit is hit


def test_other_variant_without_a_manifest_is_reported(training: Training, caplog: Any) -> None:
    training.record(K1)
    [variant] = training.variants()
    (variant / "manifest.json").unlink()
    text = log_of(training, caplog, "cache", **{TEMPERATURE: 0.7})
    assert f"{variant} has rollouts but no manifest.json" in text
    assert f"rollout-skip verify {variant}" in text


def test_replay_without_manifest_does_not_report_its_own_variant_as_ignored(training: Training, caplog: Any) -> None:
    training.record(K1)
    [variant] = training.variants()
    (variant / "manifest.json").unlink()
    text = log_of(training, caplog, "replay")
    assert "so they are used" in text
    assert "ignored: " not in text


def make_unreadable(folder: Path, monkeypatch: Any) -> None:
    """Like a folder of another user, which a test that runs as root cannot create."""
    plain_read, plain_folders = LocalStorage.read, LocalStorage.folders

    def refuse(path: Path) -> None:
        if path == folder or folder in path.parents:
            raise PermissionError(13, "Permission denied", str(path))

    def read(self: LocalStorage, name: str, file: str, limit: int) -> bytes:
        refuse(self.root / name / file)
        return plain_read(self, name, file, limit)

    def folders(self: LocalStorage) -> Any:
        refuse(self.root)
        return plain_folders(self)

    monkeypatch.setattr(LocalStorage, "read", read)
    monkeypatch.setattr(LocalStorage, "folders", folders)


@pytest.mark.parametrize("other", [{}, {TEMPERATURE: 0.7}])
@pytest.mark.parametrize("is_linked", [True, False])
def test_unreadable_run_does_not_hide_the_others(
    training: Training, caplog: Any, monkeypatch: Any, other: dict[str, Any], is_linked: bool
) -> None:
    training.record(K1, **other)
    training.record(K1, **other, trainer__experiment_name="exp-2026111")
    nearest = training.dumps / RUN_NAME.replace("exp", "exp-2026111")
    if is_linked:
        [variant] = nearest.iterdir()
        (variant / "manifest.json").rename(training.folder / "manifest.json")
        (variant / "manifest.json").symlink_to(training.folder / "manifest.json")
    else:
        make_unreadable(nearest, monkeypatch)
    text = log_of(training, caplog, "cache", **LATER)
    assert f"{training.dumps}/{RUN_NAME}/" in text


@pytest.mark.parametrize("is_linked", [True, False])
def test_other_variant_that_is_unreadable_does_not_stop_a_training(
    training: Training, caplog: Any, monkeypatch: Any, is_linked: bool
) -> None:
    training.record(K1, **{TEMPERATURE: 0.7})
    [variant] = training.variants()
    if is_linked:
        (variant / "manifest.json").rename(training.folder / "manifest.json")
        (variant / "manifest.json").symlink_to(training.folder / "manifest.json")
    else:
        make_unreadable(variant, monkeypatch)
    for mode in ("record", "cache"):
        text = log_of(training, caplog, mode)
        assert "ignored: " in text
        assert f"{variant}/manifest.json" in text
