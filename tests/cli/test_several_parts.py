"""Every command and the report read an entry with several parts like one with a single part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from tests.arithmetic_run import conversation, encode, make_tokenizer
from tests.batches import objects
from tests.entry_files import part_files
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.report.collect import OpenVariant
from verl_rollout_skip.report.entry_view import EntryViews
from verl_rollout_skip.report.follow import Follower
from verl_rollout_skip.report.sampling import Sampling
from verl_rollout_skip.report.tokens import TokenTexts
from verl_rollout_skip.store.reader import SCORE, Side, StoreReader
from verl_rollout_skip.store.storage.local import LocalStorage

KEY = RolloutKey(1)
TOKENIZER = make_tokenizer()
PROMPTS, SAMPLES = 6, 4
PART_BYTES = 40_000


def rollout(seed: int = 1) -> tuple[Any, Any]:
    """Six questions with four answers each, and images and arrays in the cells of the input."""
    inputs, texts, scores = conversation(1, PROMPTS, seed=seed)
    output = encode(TOKENIZER, inputs, texts, scores)
    rows = len(output)
    answers = [{"ground_truth": np.arange(row // SAMPLES, dtype=np.int64), "style": "rule"} for row in range(rows)]
    inputs.non_tensor_batch["reward_model"] = objects(answers)
    pictures = [{"image": Image.new("RGB", (8, 8), (row // SAMPLES, 0, 0))} for row in range(rows)]
    inputs.non_tensor_batch["multi_modal_data"] = objects(pictures)
    output.non_tensor_batch["acc"] = np.arange(rows) % 2 == 0
    output.meta_info["reward_extra_keys"] = ["acc"]
    return output, inputs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same rollout in one part and in several."""
    root = tmp_path_factory.mktemp("parts")
    whole, split = root / "whole", root / "split"
    output, inputs = rollout()
    for folder, part_bytes in ((whole, 1 << 30), (split, PART_BYTES)):
        with RolloutStore(folder, background=False, part_bytes=part_bytes) as store:
            store.put(KEY, output, inputs=inputs)
        (folder / "tokenizer").mkdir()
        TOKENIZER.save(str(folder / "tokenizer" / "tokenizer.json"))
    assert (len(part_files(whole)), len(part_files(split)) > 2) == (1, True)
    return whole, split


def run(capsys: Any, *arguments: Any, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_columns_tokens_and_cells_cover_all_parts(folders: tuple[Path, Path]) -> None:
    whole, split = (StoreReader.at(str(folder)).entry(KEY) for folder in folders)
    assert split.names == whole.names
    for name in ("prompts", "responses", "rollout_log_probs"):
        expected, found = whole.tokens(name), split.tokens(name)
        assert expected is not None
        assert found is not None
        assert all(np.array_equal(one, two) for one, two in zip(expected, found, strict=True)), name
    assert np.array_equal(split.numbers(SCORE), whole.numbers(SCORE))
    assert split.column(SCORE).type == pa.float64()
    last = whole.record.rows - 1
    [answer, first] = split.cells("reward_model", [last, 0], Side.INPUT) or []
    assert (answer["ground_truth"].tolist(), first["ground_truth"].tolist()) == ([0, 1, 2, 3, 4], [])
    assert split.cells("multi_modal_data", [last], Side.INPUT) == [{"image": "(image RGB [8, 8])"}]
    assert split.cells("acc") == whole.cells("acc")
    assert split.meta() == whole.meta()


def test_show_of_a_row_in_the_last_part(folders: tuple[Path, Path], capsys: Any) -> None:
    row = PROMPTS * SAMPLES - 1
    whole, split = (run(capsys, "show", folder, "--row", row)["samples"] for folder in folders)
    assert split == whole
    [sample] = split
    assert sample["reward_model"] == {"ground_truth": [0, 1, 2, 3, 4], "style": "rule"}


def test_show_lists_the_parts(folders: tuple[Path, Path], capsys: Any) -> None:
    _, split = folders
    parts = run(capsys, "show", split)["record"]["parts"]
    assert {part["file"]: part["bytes"] for part in parts} == {p.name: p.stat().st_size for p in part_files(split)}
    assert main(["show", str(split)]) == 0
    shown = capsys.readouterr().out
    assert all(path.name in shown for path in part_files(split))
    assert main(["show", str(part_files(split)[-1])]) == 0, "a part is a path of its entry"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_exports_are_the_same(folders: tuple[Path, Path], tmp_path: Path, capsys: Any, form: str) -> None:
    made = []
    for folder in folders:
        done = run(capsys, "export", folder, "-o", tmp_path / folder.name, "--format", form)
        assert done["rows"] == PROMPTS * SAMPLES
        made.append(Path(done["files"][0]).read_bytes())
    assert made[0] == made[1]


def test_statistics_are_the_same(folders: tuple[Path, Path], capsys: Any) -> None:
    whole, split = (run(capsys, "stats", folder)["variants"][0]["steps"][0] for folder in folders)
    for step in (whole, split):
        del step["bytes"], step["created_at"]
    assert split == whole
    assert split["pass_rate"] == 0.5


def test_the_same_rollout_in_different_parts_has_no_differences(folders: tuple[Path, Path], capsys: Any) -> None:
    assert run(capsys, "diff", *folders)["same"] is True


def test_a_difference_is_found_in_any_part(folders: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    """The last response differs, and the columns derived from it, against an entry with different parts."""
    output, inputs = rollout()
    row = len(output) - 1
    output.batch["responses"][row, 0] += 1
    output.batch["input_ids"] = torch.cat([output.batch["prompts"], output.batch["responses"]], dim=1)
    with RolloutStore(tmp_path, background=False, part_bytes=PART_BYTES // 2) as store:
        store.put(KEY, output, inputs=inputs)
    for folder in folders:
        [step] = run(capsys, "diff", folder, tmp_path, code=1)["pairs"][0]["steps"]
        assert (step["responses"]["differ"], step["responses"]["first"]["row_a"]) == (1, row)
        assert step["columns"] == ["responses"]


def test_a_different_image_is_a_difference_in_its_column(
    folders: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    output, inputs = rollout()
    inputs.non_tensor_batch["multi_modal_data"][-1] = {"image": Image.new("RGB", (8, 8), (5, 0, 1))}
    with RolloutStore(tmp_path, background=False, part_bytes=PART_BYTES // 2) as store:
        store.put(KEY, output, inputs=inputs)
    for folder in folders:
        [step] = run(capsys, "diff", folder, tmp_path, code=1)["pairs"][0]["steps"]
        assert step["prompts"]["other_inputs"] == 1
        assert step["columns"] == ["in__multi_modal_data"]


def test_the_report_is_the_same(folders: tuple[Path, Path]) -> None:
    found = []
    for folder in folders:
        views = EntryViews(StoreReader.at(str(folder)), TokenTexts(TOKENIZER, "here"), Sampling(), None)
        view = views.view(KEY, 100)
        assert view.broken is None
        statistics = {**view.json["statistics"], "bytes": None, "created_at": None}
        found.append([statistics, view.json["groups"], view.json["vocabulary"], views.whole_group(KEY, 5)])
    assert found[0] == found[1]


def test_a_live_view_reads_it(folders: tuple[Path, Path]) -> None:
    follower = Follower(OpenVariant.open(str(folders[1])), Sampling())
    follower.poll()
    [entry] = json.loads(follower.changes(0))["entries"]
    assert (entry["broken"], entry["all_groups"], len(entry["groups"])) == (None, PROMPTS, PROMPTS)


def test_report_reads_it(folders: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    done = run(capsys, "report", folders[1], "-o", tmp_path / "page.html")
    assert (done["entries"], done["rows"], done["broken"]) == (1, PROMPTS * SAMPLES, [])


def test_a_copy_has_all_parts(folders: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    _, split = folders
    [copied] = run(capsys, "copy", split, tmp_path / "copy", "--read-back")["variants"]
    assert (copied["copied"], copied["problems"]) == (1, [])
    copies = {path.name: path.read_bytes() for path in part_files(tmp_path / "copy")}
    assert copies == {path.name: path.read_bytes() for path in part_files(split)}
    assert run(capsys, "verify", tmp_path / "copy")["ok"] is True


@pytest.mark.parametrize("command", ["stats", "verify"])
def test_a_missing_part_is_named(tmp_path: Path, capsys: Any, command: str) -> None:
    output, inputs = rollout()
    RolloutStore(tmp_path, background=False, part_bytes=PART_BYTES).put(KEY, output, inputs=inputs)
    lost = part_files(tmp_path)[-1]
    lost.unlink()
    done = run(capsys, command, tmp_path, code=1)
    [error] = done["problems"] if command == "verify" else done["variants"][0]["unreadable"]
    assert lost.name in error["error"]


class ReplacedMeanwhile(LocalStorage):
    """Another process replaces the entry right after its record is read."""

    replace: Any = None

    def read(self, folder: str, name: str, limit: int) -> bytes:
        data = super().read(folder, name, limit)
        if name.endswith(".json") and self.replace is not None:
            replace, self.replace = self.replace, None
            replace()
        return data


@pytest.mark.parametrize("check_digest", [False, True])
def test_an_entry_that_is_replaced_while_it_is_opened_is_read_again(tmp_path: Path, check_digest: bool) -> None:
    store = RolloutStore(tmp_path, background=False, part_bytes=PART_BYTES)
    (old, given), (new, other) = rollout(1), rollout(2)
    store.put(KEY, old, inputs=given)
    storage = ReplacedMeanwhile(tmp_path)
    storage.replace = lambda: store.put(KEY, new, inputs=other, replace=True)
    entry = StoreReader(storage).entry(KEY, check_digest)
    assert entry.record.content == store.record(KEY).content
    responses = entry.tokens("responses")
    lengths = new.batch["response_mask"].sum(-1).tolist()
    assert responses is not None
    assert [len(row) for row in responses] == lengths


@pytest.mark.parametrize("lost", [1, None])
def test_verify_lists_an_entry_that_was_set_aside_once(tmp_path: Path, capsys: Any, lost: int | None) -> None:
    """The entry is listed once, by its renamed record, however many parts are left."""
    output, inputs = rollout()
    store = RolloutStore(tmp_path, background=False, part_bytes=PART_BYTES)
    store.put(KEY, output, inputs=inputs)
    for path in part_files(tmp_path)[:lost]:
        path.unlink()
    aside = store.set_aside(KEY)
    assert run(capsys, "verify", tmp_path)["set_aside"] == [aside]
