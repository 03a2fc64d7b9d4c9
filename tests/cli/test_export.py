"""``rollout-skip export``: text files for verl, pandas and Hugging Face datasets."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models
from verl import DataProto

from tests.batches import objects, rollout_input, rollout_output
from tests.cli_program import assert_one_line_error, run, run_as_nobody, run_without_torch
from tests.entry_files import part_file
from tests.trainings import Training, contents
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main

K1, K2 = RolloutKey(1), RolloutKey(2)
END = "<|end|>"


def words() -> Any:
    """A tokenizer with 50,000 words. Tokens 0 (padding) and 7 (end) are special."""
    vocabulary = {"<pad>": 0, END: 7} | {f"w{token}": token for token in range(50_000) if token not in (0, 7)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", END])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    words().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = Training(tmp_path_factory.mktemp("recorded"))
    (training.folder / "inputs" / "model" / "tokenizer.json").write_text(words().to_str())
    training.record(K1, RolloutKey(1, 1), K2)
    return training.variants()[0]


def export(capsys: Any, path: Any, out: Path, *options: Any, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["export", str(path), "-o", str(out), *map(str, options), "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def written_by_verl(batch: Any, inputs: Any, step: int, folder: Path) -> None:
    """The file that verl 0.9.1 writes for this batch, by calling the method of its trainer."""
    from transformers import PreTrainedTokenizerFast
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    columns = {**inputs.non_tensor_batch, **batch.non_tensor_batch}
    whole = DataProto(batch.batch.clone(), columns, batch.meta_info)
    whole.batch["token_level_scores"] = whole.batch["rm_scores"]
    trainer = SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=words()))
    trainer._dump_generations = lambda **given: RayPPOTrainer._write_generations(**given, global_steps=step)
    extras = {key: whole.non_tensor_batch[key] for key in whole.meta_info["reward_extra_keys"]}
    RayPPOTrainer._log_rollout_data(trainer, whole, extras, {}, str(folder))


def test_the_jsonl_equals_the_file_that_verl_writes(tmp_path: Path, tokenizer: Path, capsys: Any) -> None:
    """Byte for byte the file of ``trainer.rollout_data_dir``, with special tokens, reward extras and request ids."""
    batch, inputs = rollout_output(8, seed=4), rollout_input(8, seed=4)
    batch.batch["responses"][2, 0] = batch.batch["input_ids"][2, 6] = 7
    batch.non_tensor_batch["acc"] = np.array([True, False] * 4)
    batch.non_tensor_batch["pred"] = np.array([None, "73", "ü 1", "", "x", "y", "\n", "z"], dtype=object)
    batch.non_tensor_batch["request_id"] = np.array([f"request-{row}" for row in range(8)], dtype=object)
    batch.meta_info["reward_extra_keys"] = ["acc", "pred"]
    with RolloutStore(tmp_path / "store") as store:
        store.put(RolloutKey(12), batch, inputs=inputs)
    written_by_verl(batch, inputs, 12, tmp_path / "verl")
    export(capsys, tmp_path / "store", tmp_path / "ours", "--tokenizer", tokenizer)
    assert list(contents(tmp_path / "ours")) == ["12.jsonl"]
    assert contents(tmp_path / "ours") == contents(tmp_path / "verl")


def test_verls_viewer_reads_the_jsonl(tmp_path: Path, recorded: Path) -> None:
    """Uses verl's own loader. The textual version that the viewer needs is not installed here."""
    pytest.importorskip("textual", reason="verl's viewer needs textual==0.52.1")
    pytest.importorskip("aiofiles", reason="verl's viewer needs aiofiles")
    import asyncio

    try:
        viewer = importlib.import_module("scripts.rollout_viewer")
    except ImportError as error:
        pytest.skip(str(error))
    assert main(["export", str(recorded), "-o", str(tmp_path / "texts")]) == 0
    data: dict[int, Any] = {}
    asyncio.run(viewer.load_dir(tmp_path / "texts", data, SimpleNamespace(advance=lambda count: None)))
    assert [len(data[index]["samples"]) for index in (0, 1)] == [16, 8]
    assert data[0]["samples"][0]["output"].startswith("w")


def test_the_recorded_tokenizer_is_used_and_the_written_files_are_listed(recorded: Path, tmp_path: Path) -> None:
    done = run("export", recorded, "-o", tmp_path / "texts", "--format", "jsonl")
    assert done.returncode == 0, done.stderr
    assert "24 trajectories of 3 entries as jsonl" in done.stdout
    assert sorted(contents(tmp_path / "texts")) == ["1.jsonl", "2.jsonl"]


def test_torch_is_not_imported(recorded: Path, tmp_path: Path) -> None:
    done = run_without_torch("export", recorded, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert len(lines_of(tmp_path / "out" / "1.jsonl")) == 16


def test_generation_batches_of_a_step_are_exported_in_order(recorded: Path, tmp_path: Path, capsys: Any) -> None:
    export(capsys, recorded, tmp_path)
    rows = lines_of(tmp_path / "1.jsonl")
    assert [row.get("gen_batch") for row in rows] == [None] * 8 + [1] * 8
    first = RolloutStore(recorded).get(K1)
    assert [row["score"] for row in rows[:8]] == first.batch["rm_scores"].sum(-1).tolist()


def test_only_some_steps(recorded: Path, tmp_path: Path, capsys: Any) -> None:
    export(capsys, recorded, tmp_path / "one", "--steps", "2")
    export(capsys, recorded / "step_000002", tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert list(contents(tmp_path / "one")) == ["2.jsonl"]


def test_parquet_has_text_and_tokens_of_all_steps(recorded: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "texts.parquet"
    export(capsys, recorded, out, "--format", "parquet")
    frame = pd.read_parquet(out)
    assert len(frame) == 24
    assert frame[["step", "gen_batch"]].drop_duplicates().values.tolist() == [[1, 0], [1, 1], [2, 0]]
    batch, inputs = RolloutStore(recorded).get(K2), RolloutStore(recorded).inputs(K2)
    for row, found in enumerate(frame[frame.step == 2].itertuples()):
        mask = batch.batch["response_mask"][row].bool()
        tokens = batch.batch["responses"][row][mask].tolist()
        assert found.response_tokens.tolist() == tokens
        assert found.response == "".join(f"w{token}" for token in tokens)
        assert found.ground_truth == inputs.non_tensor_batch["reward_model"][row]["ground_truth"]
        assert json.loads(found.messages) == inputs.non_tensor_batch["raw_prompt"][row]
        assert json.loads(found.reward_extra) == {"acc": batch.non_tensor_batch["acc"][row]}


def test_a_dataset_opens_with_hugging_face_datasets(recorded: Path, tmp_path: Path, capsys: Any) -> None:
    from datasets import load_from_disk

    export(capsys, recorded, tmp_path / "data", "--format", "dataset")
    dataset = load_from_disk(str(tmp_path / "data"))
    assert len(dataset) == 24
    assert dataset[0]["response"].startswith("w")
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "nothing else is left"


def test_nan_scores_are_exported_as_null(tmp_path: Path, tokenizer: Path, capsys: Any) -> None:
    batch = rollout_output(2)
    batch.batch["rm_scores"][0, 0] = float("nan")
    batch.non_tensor_batch["acc"] = np.array([float("inf"), 1.0])
    with RolloutStore(tmp_path / "store") as store:
        store.put(K1, batch)
    export(capsys, tmp_path / "store", tmp_path / "out", "--tokenizer", tokenizer)
    first, second = lines_of(tmp_path / "out" / "1.jsonl")
    assert (first["score"], first["acc"], second["acc"], first["gts"]) == (None, None, 1.0, None)


def test_jagged_batches_are_exported(tmp_path: Path, tokenizer: Path, capsys: Any) -> None:
    rows = {"prompts": [[11, 12], [13]], "responses": [[14, 15, 7], [16]]}
    nested = {
        name: torch.nested.nested_tensor([torch.tensor(row) for row in value], layout=torch.jagged)
        for name, value in rows.items()
    }
    with RolloutStore(tmp_path / "store") as store:
        store.put(K1, TensorDict(nested, batch_size=[2]))
    export(capsys, tmp_path / "store", tmp_path / "out", "--tokenizer", tokenizer)
    found = lines_of(tmp_path / "out" / "1.jsonl")
    assert [(row["input"], row["output"]) for row in found] == [("w11w12", "w14w15"), ("w13", "w16")]


def test_an_empty_batch_is_an_empty_file(tmp_path: Path, tokenizer: Path, capsys: Any) -> None:
    with RolloutStore(tmp_path / "store") as store:
        store.put(K1, rollout_output(0), inputs=rollout_input(0))
    export(capsys, tmp_path / "store", tmp_path / "out", "--tokenizer", tokenizer)
    assert (tmp_path / "out" / "1.jsonl").read_bytes() == b""
    export(capsys, tmp_path / "store", tmp_path / "out.parquet", "--tokenizer", tokenizer, "--format", "parquet")
    assert len(pd.read_parquet(tmp_path / "out.parquet")) == 0


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_existing_files_are_kept_without_overwrite(recorded: Path, tmp_path: Path, capsys: Any, form: str) -> None:
    out = tmp_path / "out"
    export(capsys, recorded, out, "--format", form, "--steps", "1")
    before = contents(tmp_path)
    assert main(["export", str(recorded), "-o", str(out), "--format", form]) == 2
    assert "already exists and was kept" in capsys.readouterr().err
    assert contents(tmp_path) == before
    export(capsys, recorded, out, "--format", form, "--overwrite")
    assert contents(tmp_path) != before


@pytest.mark.parametrize("there", ["folder", "file"])
def test_overwrite_replaces_a_folder_only_if_it_is_a_dataset(recorded: Path, tmp_path: Path, there: str) -> None:
    out = tmp_path / "out"
    if there == "folder":
        (out / "thesis").mkdir(parents=True)
        (out / "thesis" / "chapter.txt").write_text("years of work")
    else:
        out.write_text("years of work")
    before = contents(tmp_path)
    done = run("export", recorded, "-o", out, "--format", "dataset", "--overwrite")
    assert_one_line_error(done, "only a Hugging Face dataset is replaced", "dataset_info.json and state.json")
    assert contents(tmp_path) == before


def test_an_empty_folder_may_become_a_dataset(recorded: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    export(capsys, recorded, tmp_path / "out", "--format", "dataset", "--overwrite")
    assert (tmp_path / "out" / "state.json").exists()


def test_a_dataset_that_cannot_be_replaced_is_kept(recorded: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Renaming the new dataset to its final name fails."""
    out, rename = tmp_path / "out", os.rename
    assert main(["export", str(recorded), "-o", str(out), "--format", "dataset", "--steps", "1"]) == 0
    before = contents(tmp_path)

    def fail_once(source: Any, target: Any) -> None:
        if str(source).endswith("/made"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_once)
    assert main(["export", str(recorded), "-o", str(out), "--format", "dataset", "--overwrite"]) == 2
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("form", "target"),
    [
        ("dataset", "around/variant"),
        ("dataset", "around"),
        ("dataset", "around/variant/out"),
        ("jsonl", "around/variant/step_000001"),
        ("parquet", "around/variant/step_000001/gen_000.parquet"),
        ("parquet", "link/step_000001/gen_000.parquet"),
    ],
)
def test_nothing_is_exported_into_or_over_the_recording(
    recorded: Path, tmp_path: Path, capsys: Any, form: str, target: str
) -> None:
    """Uses a copy of the recording, in case the test deletes it."""
    variant = tmp_path / "around" / "variant"
    shutil.copytree(recorded, variant)
    (tmp_path / "link").symlink_to(variant)
    before = contents(tmp_path)
    assert main(["export", str(variant), "-o", str(tmp_path / target), "--format", form, "--overwrite"]) == 2
    assert "contains the other. Choose" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_symbolic_link_stays_a_link(recorded: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "real.parquet").write_text("old")
    (tmp_path / "link.parquet").symlink_to(tmp_path / "real.parquet")
    export(capsys, recorded, tmp_path / "link.parquet", "--format", "parquet", "--overwrite")
    assert (tmp_path / "link.parquet").is_symlink()
    assert len(pd.read_parquet(tmp_path / "real.parquet")) == 24
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.parquet", "real.parquet"]


def test_a_symbolic_link_to_a_dataset_stays_a_link(recorded: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        export(capsys, recorded, tmp_path / "link", "--format", "dataset", "--overwrite")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "state.json").exists()


def test_export_writes_to_a_named_pipe(recorded: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        done = run("export", recorded, "-o", pipe, "--format", "parquet", "--overwrite")
        assert done.returncode == 0, done.stderr
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        received, _ = reader.communicate(timeout=30)
    assert len(pd.read_parquet(io.BytesIO(received))) == 24


def test_nested_numpy_numbers_are_exported_as_numbers(tmp_path: Path, tokenizer: Path, capsys: Any) -> None:
    batch, inputs = rollout_output(2), rollout_input(2)
    nested = {"parts": [np.float32(0.5), np.int64(3)], "ok": np.bool_(True), "bad": np.float32("nan")}
    batch.non_tensor_batch["detail"] = objects([nested, {"grid": np.array([[1, 2]])}])
    batch.meta_info["reward_extra_keys"] = ["detail"]
    with RolloutStore(tmp_path / "store") as store:
        store.put(K1, batch, inputs=inputs)
    export(capsys, tmp_path / "store", tmp_path / "out", "--tokenizer", tokenizer)
    first, second = lines_of(tmp_path / "out" / "1.jsonl")
    assert first["detail"] == {"parts": [0.5, 3], "ok": True, "bad": None}
    assert second["detail"] == {"grid": [[1, 2]]}
    export(capsys, tmp_path / "store", tmp_path / "x.parquet", "--tokenizer", tokenizer, "--format", "parquet")
    extra = pd.read_parquet(tmp_path / "x.parquet").reward_extra[0]
    assert json.loads(extra)["detail"] == first["detail"]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path, tokenizer: Path, capsys: Any, form: str) -> None:
    inputs = rollout_input(2)
    inputs.non_tensor_batch["reward_model"][0] = {"style": "rule", "ground_truth": "a\ud800b"}
    inputs.non_tensor_batch["raw_prompt"][0] = [{"role": "user", "content": "\udfff"}]
    with RolloutStore(tmp_path / "store") as store:
        store.put(K1, rollout_output(2), inputs=inputs)
    out = tmp_path / "out"
    export(capsys, tmp_path / "store", out, "--tokenizer", tokenizer, "--format", form)
    if form == "jsonl":
        assert lines_of(out / "1.jsonl")[0]["gts"] == "a?b"
    elif form == "parquet":
        frame = pd.read_parquet(out)
        assert frame.ground_truth[0] == "a?b"
        assert json.loads(frame.messages[0])[0]["content"] == "?"


def test_a_damaged_recorded_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        store.put(K1, rollout_output(2))
    folder = tmp_path / "store" / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{")
    done = run("export", tmp_path / "store", "-o", tmp_path / "x")
    assert_one_line_error(done, f"The tokenizer in {folder} cannot be used: ", "EOF", "--tokenizer DIR")
    assert "There is no tokenizer" not in done.stderr


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_a_damaged_entry_leaves_no_partial_file(tmp_path: Path, tokenizer: Path, capsys: Any, form: str) -> None:
    with RolloutStore(tmp_path / "store") as store:
        store.put(K1, rollout_output(2))
        store.put(RolloutKey(1, 1), rollout_output(2))
    data = part_file(tmp_path / "store", 1, 1)
    data.write_bytes(data.read_bytes()[:-10])
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "x"
    options = ["--format", form, "--tokenizer", str(tokenizer)]
    assert main(["export", str(tmp_path / "store"), "-o", str(target), *options]) == 2
    assert "step 1, generation batch 1 is damaged" in capsys.readouterr().err
    assert contents(tmp_path / "out") == {}


def test_bad_input_is_a_one_line_error_with_exit_code_2(recorded: Path, tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with RolloutStore(tmp_path / "store") as store:
        store.put(K1, rollout_output(2))
    cases: list[tuple[list[Any], str]] = [
        (["/does/not/exist", "-o", tmp_path / "x"], "/does/not/exist does not exist."),
        ([tmp_path / "store", "-o", tmp_path / "x"], "There is no tokenizer"),
        ([recorded, "-o", tmp_path / "x", "--tokenizer", tmp_path / "broken"], "cannot be loaded"),
        ([recorded, "-o", "s3://bucket/x"], "export writes only to local paths"),
    ]
    for arguments, words in cases:
        assert_one_line_error(run("export", *arguments), words)


def test_an_unwritable_destination_is_a_one_line_error(recorded: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    open_to_all: Callable[[Path], None] = lambda path: path.chmod(0o755)  # noqa: E731
    for path in (recorded, *recorded.parents[:3]):
        open_to_all(path)
    done = run_as_nobody("export", recorded, "-o", closed / "x", first=["export", recorded, "-o", tmp_path / "first"])
    assert_one_line_error(done, "Permission denied")


def test_it_works_without_datasets(recorded: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["export", str(recorded), "-o", str(tmp_path / "x"), "--format", "dataset"]) == 2
    assert "pip install datasets" in capsys.readouterr().err
    assert main(["export", str(recorded), "-o", str(tmp_path / "x"), "--format", "parquet"]) == 0
