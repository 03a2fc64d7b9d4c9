"""Folders and URLs that cannot be used, or only partly: the message names the setting, and a training continues."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.trainings import Engine, Training, contents, inputs_of, never, unreachable
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import ConfigError, EntryNotFoundError, UnsafePathError
from verl_rollout_skip.replay.steps import TrainingSteps, check_steps

K1, K2, K3 = (RolloutKey(step) for step in range(1, 4))


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


@pytest.fixture
def without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


@pytest.mark.usefixtures("without_credentials")
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/dumps", ["Unable to locate credentials", "AWS_ACCESS_KEY_ID"]),
        ("hdfs://host:8020/dumps", ["libhdfs", "JAVA_HOME", "webhdfs://"]),
        ("gs://bucket/dumps", ["gcsfs", "pip install 'verl-rollout-skip[remote]'"]),
        ("simplecache::gs://bucket/dumps", ["fsspec's simplecache", "Use gs://bucket/dumps"]),
        ("dir::gs://bucket/dumps", ["gcsfs", "pip install 'verl-rollout-skip[remote]'"]),
        ("abfs://container/dumps", ["adlfs"]),
        ("dumps://somewhere", ["Protocol not known: dumps", "absolute path"]),
    ],
)
def test_unusable_url_is_an_error_that_names_the_setting_and_what_is_missing(
    training: Training, url: str, words: list[str]
) -> None:
    for skip in ({"dump_dir": url}, {"source": f"{url}/run/variant"}):
        [(key, value)] = skip.items()
        with pytest.raises(ConfigError) as caught:
            training.open("cache" if key == "dump_dir" else "replay", skip)
        assert f"rollout_skip.{key} is {value}" in str(caught.value)
        for word in words:
            assert word in str(caught.value)


def test_any_error_of_an_object_store_library_does_not_stop_a_training(
    training: Training, monkeypatch: Any, caplog: Any
) -> None:
    """These libraries raise their own errors, such as botocore.exceptions.NoCredentialsError."""

    class CredentialsExpired(Exception):
        pass

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise CredentialsExpired("the token is out of date")

    name = training.folder.name
    with training.open("cache", {"dump_dir": f"memory://{name}/dumps"}) as skip:
        assert not skip.step(K1, inputs_of(K1), Engine()).hit
        skip.step(K2, inputs_of(K2), Engine())
        assert skip._recorder is not None
        store = skip._recorder.store
        store.flush()
        with monkeypatch.context() as patched:
            patched.setattr(MemoryFileSystem, "info", refuse)
            assert not skip.step(K3, inputs_of(K3), Engine()).hit
            store._writer.wait(K3)
    assert "the token is out of date" in caplog.text
    assert skip.statistics.dump_failures == 1
    files = fsspec.filesystem("memory").store
    for path in [path for path in files if path.startswith(f"/{name}/")]:
        del files[path]


def test_local_path_may_contain_colon_and_slashes(training: Training) -> None:
    dump_dir = f"{training.folder}/lr://1e-6"
    for hit in (False, True):
        with training.open("cache", {"dump_dir": dump_dir}) as skip:
            assert skip.step(K1, inputs_of(K1), Engine()).hit is hit
    assert os.listdir(training.folder / "lr:" / "1e-6")
    assert RolloutStore(f"{training.folder}/lr://1e-6/run").keys() == []


@pytest.fixture
def linked(training: Training) -> Path:
    """A recording whose second step was moved to a larger disk and replaced by a link."""
    training.record(K1, K2, K3)
    [variant] = training.variants()
    elsewhere = training.folder / "larger disk"
    (variant / "step_000002").rename(elsewhere)
    (variant / "step_000002").symlink_to(elsewhere)
    return elsewhere


def test_linked_step_folder_is_generated_and_the_training_continues(
    training: Training, linked: Path, caplog: Any
) -> None:
    before = contents(linked)
    with training.open("cache") as skip:
        hits = [skip.step(key, inputs_of(key), Engine()).hit for key in (K1, K2, K3)]
    assert hits == [True, False, True]
    assert f"{training.variants()[0]}/step_000002 is a symbolic link" in caplog.text
    assert skip.statistics.dump_failures == 1
    assert contents(linked) == before, "nothing is written through the link"


def test_linked_step_folder_in_a_replay_is_an_error_that_names_it(training: Training, linked: Path) -> None:
    with training.open("replay") as replay:
        with pytest.raises(EntryNotFoundError, match=r"step_000002.* is a symbolic link"):
            check_steps(replay, TrainingSteps(3))
        assert replay.step(K1, inputs_of(K1), never).hit, "the step before it is still loaded"
        with pytest.raises(UnsafePathError, match=r"step_000002.* is a symbolic link"):
            replay.step(K2, inputs_of(K2), never)


def test_recording_continues_after_a_linked_step_folder_if_dump_errors_are_warnings(
    training: Training, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    with training.open("record", {"on_dump_error": "warn"}) as skip:
        skip.step(K1, inputs_of(K1), Engine())
        [variant] = training.variants()
        (variant / "step_000002").symlink_to(tmp_path)
        skip.step(K2, inputs_of(K2), Engine())
        skip.step(K3, inputs_of(K3), Engine())
    assert skip.statistics.dump_failures == 1
    assert RolloutStore(variant).keys() == [K1, K3]


@contextmanager
def linked_manifest(variant: Path) -> Iterator[None]:
    """A variant whose manifest is a symbolic link."""
    variant.mkdir(parents=True)
    (variant / "manifest.json").symlink_to("elsewhere.json")
    yield
    (variant / "manifest.json").unlink()


UNUSABLE = pytest.mark.parametrize("unusable", [unreachable, linked_manifest])
Unusable = Callable[[Path], AbstractContextManager[None]]


@UNUSABLE
def test_variant_that_is_unusable_in_the_first_step_does_not_stop_a_training(
    training: Training, caplog: Any, unusable: Unusable
) -> None:
    with training.open("cache") as skip:
        assert skip.run.write_folder is not None
        variant = Path(skip.run.write_folder)
        with unusable(variant):
            assert not skip.step(K1, inputs_of(K1), Engine()).hit
        assert not skip.step(K2, inputs_of(K2), Engine()).hit
    assert caplog.text.count(f"step 1, generation batch 0 is generated, because {variant} cannot be read") == 1
    assert "step 1, generation batch 0 could not be looked up" in skip.summary()
    assert skip.statistics.dump_failures > 0
    assert RolloutStore(variant).keys() == [K2]


@UNUSABLE
def test_variant_that_is_unusable_in_the_first_step_stops_a_training_if_a_failed_dump_would(
    training: Training, unusable: Unusable
) -> None:
    with training.open("cache", {"on_dump_error": "fail"}) as skip:
        assert skip.run.write_folder is not None
        with unusable(Path(skip.run.write_folder)), pytest.raises((OSError, UnsafePathError), match="symbolic link"):
            skip.step(K1, inputs_of(K1), never)


def test_steps_of_another_recording_are_loaded_while_the_own_variant_is_unreachable(
    training: Training, caplog: Any
) -> None:
    training.record(K1)
    source, elsewhere = str(training.variants()[0]), training.folder / "elsewhere"
    with training.open("cache", {"source": source, "dump_dir": str(elsewhere)}) as skip:
        assert skip.run.write_folder is not None
        caplog.clear()
        with unreachable(Path(skip.run.write_folder)):
            assert skip.step(K1, inputs_of(K1), never).hit
            assert not caplog.records
            assert not skip.step(K2, inputs_of(K2), Engine()).hit
        assert f"step 2, generation batch 0 is generated, because {skip.run.write_folder}" in caplog.text
