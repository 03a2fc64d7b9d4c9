"""Stories of places that cannot be used, or only in part: the message names the setting, and a training goes on."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.trainings import Engine, Training, contents, inputs_of, never
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import ConfigError, EntryNotFoundError, UnsafePathError
from verl_rollout_skip.steps import TrainingSteps, check_steps

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
        ("simplecache::gs://bucket/dumps", ["gcsfs", "pip install 'verl-rollout-skip[remote]'"]),
        ("abfs://container/dumps", ["adlfs"]),
        ("dumps://somewhere", ["Protocol not known: dumps", "absolute path"]),
    ],
)
def test_a_url_that_cannot_be_used_is_an_error_that_names_the_setting_and_what_is_missing(
    training: Training, url: str, words: list[str]
) -> None:
    for skip in ({"dump_dir": url}, {"source": f"{url}/run/variant"}):
        [(key, value)] = skip.items()
        with pytest.raises(ConfigError) as caught:
            training.open("cache" if key == "dump_dir" else "replay", skip)
        assert f"rollout_skip.{key} is {value}" in str(caught.value)
        for word in words:
            assert word in str(caught.value)


def test_a_store_that_stops_answering_with_an_error_of_its_own_does_not_end_a_training(
    training: Training, monkeypatch: Any, caplog: Any
) -> None:
    """Libraries for object stores raise what they like, such as botocore.exceptions.NoCredentialsError."""

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


def test_a_local_path_may_contain_what_urls_begin_with(training: Training) -> None:
    dump_dir = f"{training.folder}/lr://1e-6"
    for hit in (False, True):
        with training.open("cache", {"dump_dir": dump_dir}) as skip:
            assert skip.step(K1, inputs_of(K1), Engine()).hit is hit
    assert os.listdir(training.folder / "lr:" / "1e-6")
    assert RolloutStore(f"{training.folder}/lr://1e-6/run").keys() == []


@pytest.fixture
def linked(training: Training) -> Path:
    """A recording whose second step is a link to a folder elsewhere, as after moving it to a larger disk."""
    training.record(K1, K2, K3)
    [variant] = training.variants()
    elsewhere = training.folder / "larger disk"
    (variant / "step_000002").rename(elsewhere)
    (variant / "step_000002").symlink_to(elsewhere)
    return elsewhere


def test_a_linked_step_folder_is_generated_and_the_training_goes_on(
    training: Training, linked: Path, caplog: Any
) -> None:
    before = contents(linked)
    with training.open("cache") as skip:
        hits = [skip.step(key, inputs_of(key), Engine()).hit for key in (K1, K2, K3)]
    assert hits == [True, False, True]
    assert f"{training.variants()[0]}/step_000002 is a symbolic link" in caplog.text
    assert skip.statistics.dump_failures == 1
    assert contents(linked) == before, "nothing is written through the link"


def test_a_linked_step_folder_in_a_replay_is_an_error_that_names_it(training: Training, linked: Path) -> None:
    with training.open("replay") as replay:
        with pytest.raises(EntryNotFoundError, match=r"step_000002.* is a symbolic link"):
            check_steps(replay, TrainingSteps(3))
        assert replay.step(K1, inputs_of(K1), never).hit, "and the step before it is loaded all the same"
        with pytest.raises(UnsafePathError, match=r"step_000002.* is a symbolic link"):
            replay.step(K2, inputs_of(K2), never)


def test_a_recording_goes_on_past_a_linked_step_folder_if_failed_dumps_are_only_warnings(
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
