"""A manifest says what rollouts were recorded from. It is written once, and an edited or damaged one is an error."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.verl_configs import compose_ppo
from verl_rollout_skip.errors import ManifestError
from verl_rollout_skip.fingerprint.fingerprint import make_fingerprint
from verl_rollout_skip.fingerprint.layout import gpu_layout, layout_difference, versions
from verl_rollout_skip.runs import checked_json
from verl_rollout_skip.runs.manifest import Manifest, read_manifest, write_manifest
from verl_rollout_skip.runs.trainings import TrainingFile, training_name
from verl_rollout_skip.store.storage.locations import open_storage

CONFIG = {
    "actor_rollout_ref": {
        "rollout": {"temperature": 1.0, "n": 8, "tensor_model_parallel_size": 2},
        "actor": {"optim": {"lr": 1e-6}, "ulysses_sequence_parallel_size": 4},
    },
    "trainer": {"nnodes": 2, "n_gpus_per_node": 8, "device": "cuda"},
    "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"WANDB_API_KEY": "hunter2"}}}},
    "reward": {"reward_kwargs": {"judge": "https://me:hunter2@judge/v1", "note": "größer → 实验"}},
}
ROOT = Path(__file__).resolve().parents[2]


def made(config: Any = CONFIG) -> Manifest:
    return Manifest.make("run", config, make_fingerprint(config))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_manifest(open_storage(str(tmp_path)), made())
    return tmp_path / "manifest.json"


def load_error(file: Path) -> str:
    with pytest.raises(ManifestError) as caught:
        Manifest.load(str(file))
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_manifest_is_read_back_as_written(written: Path) -> None:
    manifest = made()
    found = Manifest.load(str(written))
    assert replace(found, created_at="", path="") == replace(manifest, created_at="")
    assert found.path == str(written)
    assert found.config_hash == make_fingerprint(CONFIG).config_hash


def test_manifest_can_be_loaded_by_file_or_folder(written: Path) -> None:
    manifest = Manifest.load(str(written))
    for path in (str(written.parent), f"{written.parent}/", f"file://{written}"):
        assert Manifest.load(path) == manifest


def test_missing_manifest_is_an_error_that_says_which_path_to_give(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.load(str(tmp_path / "nothing"))
    assert str(caught.value) == (
        f"There is no manifest.json in {tmp_path}/nothing. Give the path of a manifest, or of the folder with the "
        "dumps: DUMP_DIR/RUN_NAME/VARIANT."
    )


def test_manifest_is_readable_and_has_no_secrets(written: Path) -> None:
    text = written.read_text()
    content = json.loads(text)
    assert content["format_version"] == 2
    assert content["fingerprint"]["actor_rollout_ref.rollout.temperature"] == 1.0
    assert content["training"] == {"actor_rollout_ref.actor.optim.lr": 1e-06}
    assert content["config"]["trainer"]["n_gpus_per_node"] == 8
    assert content["versions"]["python"] == sys.version.split()[0]
    assert '"note": "größer → 实验"' in text
    assert "\n  " in text
    assert "hunter2" not in text
    assert "https://me:***@judge/v1" in text


def test_manifest_contains_verls_whole_configuration(tmp_path: Path) -> None:
    config = compose_ppo()
    write_manifest(open_storage(str(tmp_path)), made(config))
    found = Manifest.load(str(tmp_path))
    assert found.config == OmegaConf.to_container(config, resolve=True)
    assert found.gpu_layout["world_size"] == 8


def test_manifest_is_written_once(written: Path) -> None:
    before = written.read_bytes()
    later = replace(made(), created_at="2099-01-01T00:00:00+00:00")
    assert write_manifest(open_storage(str(written.parent)), later).created_at != later.created_at
    assert written.read_bytes() == before


def test_manifest_with_different_settings_is_never_replaced(written: Path) -> None:
    with pytest.raises(ManifestError, match="belongs to rollouts with different settings"):
        write_manifest(open_storage(str(written.parent)), made({"data": {"seed": 2}}))


def test_edited_manifest_is_an_error(written: Path) -> None:
    written.write_text(written.read_text().replace('"actor_rollout_ref.rollout.temperature": 1.0', '"x": 1.0'))
    message = load_error(written)
    assert "was edited or damaged: its checksum is wrong, so it does not prove which settings the rollouts" in message
    assert "Restore it from a copy, or move its folder away and record again." in message


def test_even_a_changed_space_is_an_error(written: Path) -> None:
    written.write_text(json.dumps(json.loads(written.read_text())))
    assert "was edited or damaged" in load_error(written)


def test_hash_that_does_not_match_the_settings_is_an_error(written: Path) -> None:
    fields = json.loads(written.read_text())
    del fields["checksum"]
    fields["fingerprint"]["actor_rollout_ref.rollout.temperature"] = 0.7
    written.write_bytes(checked_json.render(fields))
    assert "was edited: config_hash does not match the settings in it." in load_error(written)


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_truncated_manifest_is_an_error(written: Path, keep: int) -> None:
    written.write_bytes(written.read_bytes()[:keep])
    assert "is damaged: not a JSON object" in load_error(written)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[1, 2]", b"null", b"hello", b"[" * 100_000])
def test_manifest_that_is_not_a_json_object_is_an_error(written: Path, content: bytes) -> None:
    written.write_bytes(content)
    message = load_error(written)
    assert "is damaged: not a JSON object" in message
    assert message.endswith("Restore it from a copy.")


def test_manifest_of_another_program_is_an_error(written: Path) -> None:
    written.write_text('{"name": "my web app", "icons": []}')
    assert "was not written by this package, or was edited: it has no checksum." in load_error(written)
    written.write_bytes(checked_json.render({"format_version": 2, "name": "x"}))
    assert "is not a manifest" in load_error(written)


def test_manifest_of_a_later_version_asks_for_an_upgrade(written: Path) -> None:
    fields = {**json.loads(written.read_text()), "format_version": 3, "new_field": True, "checksum": "of another kind"}
    written.write_text(json.dumps(fields))
    assert load_error(written).endswith(
        "has format version 3, but this version of verl-rollout-skip reads up to version 2. "
        "Upgrade verl-rollout-skip to read it."
    )


def test_each_training_that_records_has_its_own_file(written: Path) -> None:
    storage = open_storage(str(written.parent))
    for nodes in (2, 4):
        recording = TrainingFile(
            storage, gpu_layout({"trainer": {"nnodes": nodes, "n_gpus_per_node": 8}}), training_name()
        )
        recording.save([1])
        recording.save([3, 1, 2, 2])
    found = Manifest.load(str(written)).trainings
    assert sorted(item["gpu_layout"]["world_size"] for item in found) == [16, 32]
    assert [item["steps"] for item in found] == [[1, 2, 3], [1, 2, 3]]
    assert all({"started_at", "updated_at", "host", "versions"} <= set(item) for item in found)


def test_damaged_training_file_is_left_out_and_rollouts_stay_usable(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(str(written.parent))
    TrainingFile(storage, {}, training_name()).save([1])
    TrainingFile(storage, {}, training_name()).save([2])
    damaged = min((written.parent / "trainings").iterdir())
    damaged.write_text("{")
    with caplog.at_level(logging.WARNING, logger="verl_rollout_skip"):
        assert len(Manifest.load(str(written)).trainings) == 1
    assert str(damaged) in caplog.text


def test_several_processes_can_start_recording_at_once(tmp_path: Path) -> None:
    script = """
import json, sys, time
from verl_rollout_skip.fingerprint.fingerprint import make_fingerprint
from verl_rollout_skip.runs.manifest import Manifest, write_manifest
from verl_rollout_skip.runs.trainings import TrainingFile, training_name
from verl_rollout_skip.store.storage.locations import open_storage
folder, number, config = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
print("ready", flush=True); sys.stdin.readline()
storage = open_storage(folder)
manifest = write_manifest(storage, Manifest.make(f"run {number}", config, make_fingerprint(config)))
recording = TrainingFile(storage, manifest.gpu_layout, training_name())
for step in range(20):
    recording.save(list(range(number * 100, number * 100 + step + 1)))
print(manifest.run_name, flush=True)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "variant"), str(number), json.dumps(CONFIG)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(8)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    winners = [process.communicate("go\n")[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    found = Manifest.load(str(tmp_path / "variant"))
    assert set(winners) == {found.run_name}
    steps = sorted(item["steps"] for item in found.trainings)
    assert steps == [list(range(number * 100, number * 100 + 20)) for number in range(8)]
    assert not [file for file in (tmp_path / "variant").rglob("*") if file.is_file() and file.suffix != ".json"]


def test_manifest_on_an_object_store() -> None:
    url = f"memory://{uuid.uuid4().hex}/variant"
    storage = open_storage(url)
    assert read_manifest(storage) is None
    write_manifest(storage, made())
    TrainingFile(storage, {}, training_name()).save([1])
    assert write_manifest(storage, made()).trainings[0]["steps"] == [1]
    assert Manifest.load(f"{url}/manifest.json") == Manifest.load(url)
    assert Manifest.load(url).path == f"{url}/manifest.json"


# The layout: recorded and reported, but never a reason for a miss.


def test_layout_comes_from_the_configuration() -> None:
    layout = gpu_layout(CONFIG)
    assert layout == {
        "nnodes": 2,
        "n_gpus_per_node": 8,
        "world_size": 16,
        "accelerator": "cuda",
        "actor": {"tensor": None, "pipeline": None, "sequence": 4, "data": None},
        "rollout": {"tensor": 2, "pipeline": None, "sequence": None, "data": None},
        "ref": {"tensor": None, "pipeline": None, "sequence": None, "data": None},
        "critic": {"tensor": None, "pipeline": None, "sequence": None, "data": None},
    }


def test_layout_of_a_megatron_training() -> None:
    layout = gpu_layout(
        compose_ppo(
            "model_engine=megatron",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            "critic.megatron.context_parallel_size=8",
            "actor_rollout_ref.rollout.data_parallel_size=3",
        )
    )
    assert layout["actor"] == {"tensor": 4, "pipeline": 2, "sequence": 1, "data": None}
    assert layout["critic"]["sequence"] == 8
    assert layout["rollout"] == {"tensor": 2, "pipeline": 1, "sequence": None, "data": 3}


def test_different_layout_is_reported_but_the_fingerprint_is_the_same() -> None:
    config = OmegaConf.create(CONFIG)
    before, recorded = make_fingerprint(config), gpu_layout(config)
    config.trainer.nnodes = 1
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 8
    assert make_fingerprint(config) == before
    assert layout_difference(recorded, gpu_layout(config)) == [
        "nnodes: 2 → 1",
        "rollout.tensor: 2 → 8",
        "world_size: 16 → 8",
    ]


def test_running_ray_cluster_is_part_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    assert "cluster" not in gpu_layout(CONFIG)
    ray.init(num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        cluster = gpu_layout(CONFIG)["cluster"]
    finally:
        ray.shutdown()
    assert cluster["nodes"] == 1
    assert (cluster["cpus"], cluster["gpus"]) == (1, 2)
    json.dumps(cluster)


def test_versions_of_installed_packages_are_recorded() -> None:
    found = versions()
    assert {"python", "verl_rollout_skip", "verl", "torch", "ray", "transformers"} <= set(found)
    assert found["verl"] == "0.9.1"
