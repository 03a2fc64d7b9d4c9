"""Models, tokenizers, data and code are identified by content."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import sys
from pathlib import Path

import pytest

from verl_rollout_skip.fingerprint import identity
from verl_rollout_skip.fingerprint.fingerprint import make_fingerprint
from verl_rollout_skip.fingerprint.identity import (
    UNREADABLE,
    data_identity,
    file_identity,
    model_identity,
    processing_identity,
    sampled_model_identity,
    tokenizer_identity,
)
from verl_rollout_skip.fingerprint.source_code import code_identity, module_identity

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "tokenizer.json").write_text('{"vocab": 1}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "README.md").write_text("A model.")
    return folder


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def huge_safetensors(file: Path, tensors: int = 48, size: int = 3 * GIB) -> list[tuple[int, int]]:
    """Create a sparse file as large as a shard of a 70B model; return the span of each tensor."""
    share = (size - (1 << 20)) // tensors
    header = {
        f"layers.{index}.weight": {
            "dtype": "BF16",
            "shape": [share // 2],
            "data_offsets": [index * share, (index + 1) * share],
        }
        for index in range(tensors)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + share * tensors)
    start = 8 + len(text)
    return [(start + index * share, start + (index + 1) * share) for index in range(tensors)]


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of each read."""
    counted: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(-1 if size is None else size)
            counted.append(len(data))
            return data

    monkeypatch.setattr(identity, "open", lambda file, *_, **__: Counting(file, "rb"), raising=False)
    return counted


def test_model_under_another_path_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mnt" / "other"
    shutil.copytree(model, copy)
    os.utime(copy / "config.json", (1, 1))
    assert model_identity(str(copy)) == model_identity(str(model))
    assert model_identity(f"{model}/") == model_identity(str(model))
    assert tokenizer_identity(str(copy)) == tokenizer_identity(str(model))


def test_weights_and_tokenizer_have_separate_identities(model: Path) -> None:
    weights, tokenizer = model_identity(str(model)), tokenizer_identity(str(model))
    flip(model / "model.safetensors", 5000)
    assert tokenizer_identity(str(model)) == tokenizer
    assert model_identity(str(model)) != weights
    weights = model_identity(str(model))
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0] }}"}')
    assert model_identity(str(model)) == weights
    assert tokenizer_identity(str(model)) != tokenizer


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "modeling_own.py", "preprocessor_config.json"]
)
def test_files_that_define_the_model_count(model: Path, name: str) -> None:
    before = model_identity(str(model))
    (model / name).write_text('{"changed": true}')
    assert model_identity(str(model)) != before


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "LICENSE", ".gitattributes", ".cache/x", "figure.png", "__pycache__/m.pyc"),
        *("train.log", "nohup.out", "events.out.tfevents.17.host", "trainer_state.json", "optimizer.pt"),
    ],
)
def test_other_files_in_the_model_folder_are_ignored(model: Path, name: str) -> None:
    before = model_identity(str(model))
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("changed")
    assert model_identity(str(model)) == before


def test_renamed_or_missing_file_counts(model: Path) -> None:
    before = model_identity(str(model))
    (model / "config.json").rename(model / "config2.json")
    renamed = model_identity(str(model))
    (model / "config2.json").unlink()
    assert len({before, renamed, model_identity(str(model))}) == 3


def test_sampling_a_huge_shard_reads_only_megabytes(tmp_path: Path, bytes_read: list[int]) -> None:
    huge_safetensors(tmp_path / "model-00001-of-00050.safetensors")
    text = sampled_model_identity(str(tmp_path))
    assert text.startswith("1 files, 3.2 GB, 1 of them only sampled, digest ")
    assert 2 << 20 < sum(bytes_read) < 5 << 20
    assert len(bytes_read) < 100


def test_sampling_detects_that_a_huge_shard_was_trained(tmp_path: Path) -> None:
    shard = tmp_path / "model.safetensors"
    spans = huge_safetensors(shard)
    seen = {sampled_model_identity(str(tmp_path))}
    for first, last in spans[::8]:
        with shard.open("r+b") as stream:
            # What training does to a tensor, in a window of it: a sparse file cannot be filled whole.
            stream.seek((first + last) // 2 - 4096)
            stream.write(os.urandom(8192))
        seen.add(sampled_model_identity(str(tmp_path)))
    flip(shard, 0)
    seen.add(sampled_model_identity(str(tmp_path)))
    flip(shard, spans[-1][1] - 1)
    seen.add(sampled_model_identity(str(tmp_path)))
    assert len(seen) == 1 + len(spans[::8]) + 2


def test_sampling_is_fast_with_very_many_tensors(tmp_path: Path, bytes_read: list[int]) -> None:
    huge_safetensors(tmp_path / "experts.safetensors", tensors=5000, size=GIB)
    sampled_model_identity(str(tmp_path))
    assert len(bytes_read) < 300
    assert sum(bytes_read) < 6 << 20


@pytest.mark.parametrize("beginning", [b"\xff" * 8, struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"])
def test_huge_file_that_is_not_safetensors_is_sampled_too(tmp_path: Path, beginning: bytes) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(beginning)
        stream.truncate(GIB)
    before = sampled_model_identity(str(tmp_path))
    flip(file, GIB - 1)
    assert sampled_model_identity(str(tmp_path)) != before


def test_file_that_grew_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    seen = set()
    for size in (GIB, GIB + 1):
        os.truncate(file, size)
        seen.add(sampled_model_identity(str(tmp_path)))
    assert len(seen) == 2


def test_one_changed_byte_in_the_data_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(bytes(40 << 20))
    before = data_identity(str(file))
    flip(file, 23_456_789)
    assert data_identity(str(file)) != before


def test_data_folder_is_identified_by_its_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0.parquet").write_text("rows")
    assert data_identity(str(tmp_path / "a")) == data_identity(str(tmp_path / "b"))


def test_snapshot_in_the_hub_cache_equals_the_model_it_links_to(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (blobs / f"blob-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    (tmp_path / "link").symlink_to(snapshot)
    assert model_identity(str(snapshot)) == model_identity(str(model)) == model_identity(str(tmp_path / "link"))
    assert tokenizer_identity(str(snapshot)) == tokenizer_identity(str(model))


def test_processor_and_code_in_a_tokenizer_folder_count(model: Path) -> None:
    """verl loads the processor and custom code from model.tokenizer_path, but not the weights."""
    before = processing_identity(str(model))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processing_own.py", "tokenizer.json"):
        (model / name).write_text("changed")
        assert processing_identity(str(model)) != before, name
        before = processing_identity(str(model))
    (model / "model.safetensors").write_text("other weights")
    assert processing_identity(str(model)) == before


def test_link_to_a_parent_folder_does_not_loop(model: Path) -> None:
    before = model_identity(str(model))
    (model / "again").symlink_to(model)
    assert model_identity(str(model)) == before


def test_name_on_the_hub_is_identified_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_identity("Qwen/Qwen3-0.6B") == f"Qwen/Qwen3-0.6B ({UNREADABLE})"
    reference = tmp_path / "models--Qwen--Qwen3-0.6B" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("c1899de289a04d12100db370d81485cdf75e47ca\n")
    assert model_identity("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B at commit c1899de289a04d12100db370d81485cdf75e47ca"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    shutil.copytree(tmp_path / "models--Qwen--Qwen3-0.6B", tmp_path / "home" / "hub" / "models--Qwen--Qwen3-0.6B")
    assert "at commit c1899de" in tokenizer_identity("Qwen/Qwen3-0.6B")


def test_unreadable_file_is_named_in_a_warning(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A link into a cache that was cleaned: these tests may run as root, whom permissions do not stop.
    (model / "model-2.safetensors").symlink_to(model / "gone")
    assert f"(model-2.safetensors: {UNREADABLE})" in model_identity(str(model))
    make_fingerprint({"actor_rollout_ref": {"model": {"path": str(model)}}})
    assert "a change to its content will not be noticed" in caplog.text


def test_missing_path_is_identified_by_name() -> None:
    assert data_identity("/nowhere/train.parquet") == f"/nowhere/train.parquet ({UNREADABLE})"


def test_changed_reward_function_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    seen = set()
    for source in ("def compute_score(): return 1", "def compute_score(): return 2"):
        file.write_text(source)
        seen.add(code_identity(str(file)))
        assert code_identity(f"file://{file}") == code_identity(str(file)) == file_identity(str(file))
    assert len(seen) == 2


def test_code_in_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_rewards_of_test"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "deep" / "__init__.py").write_text("")
    (package / "math.py").write_text("v1")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_identity("pkg://my_rewards_of_test.math")
    assert before.startswith("my_rewards_of_test.math, 2 B, digest ")
    assert code_identity("pkg://my_rewards_of_test/math") == before == module_identity("my_rewards_of_test.math")
    (package / "math.py").write_text("v2")
    assert code_identity("pkg://my_rewards_of_test.math") != before
    assert "digest" in module_identity("my_rewards_of_test")
    assert "digest" in module_identity("my_rewards_of_test.deep")
    assert "my_rewards_of_test" not in sys.modules
    assert module_identity("my_rewards_of_test.gone") == f"my_rewards_of_test.gone ({UNREADABLE})"
    assert module_identity("no_such_package_anywhere") == f"no_such_package_anywhere ({UNREADABLE})"


def test_unreadable_subfolder_of_a_model_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "private").mkdir()
    listed = os.scandir

    def refuse(folder: str) -> object:
        if str(folder).endswith("private"):
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert f"(private: {UNREADABLE})" in model_identity(str(model))
