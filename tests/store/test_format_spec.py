"""docs/format.md is enough to write a reader: one that was written after it agrees with ``RolloutStore`` in everything.

``tests/format_reader.py`` is that reader. It imports nothing of this package.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests import format_reader
from tests.batches import dump_parts, objects, rollout_input, rollout_output
from tests.entry_files import part_file
from tests.format_reader import DamagedError, Entry
from tests.trainings import Training
from verl_rollout_skip import Manifest, RolloutKey, RolloutStore

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
EXAMPLES = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)]
KEYS = [RolloutKey(1), RolloutKey(2, 0), RolloutKey(2, 1), RolloutKey(3)]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    recorded = Training(tmp_path_factory.mktemp("recorded"))
    recorded.record(*KEYS)
    return recorded


@pytest.fixture(scope="module")
def variant(training: Training) -> Path:
    (found,) = training.variants()
    return found


@pytest.fixture(scope="module")
def entries(variant: Path) -> list[Entry]:
    return [Entry(variant, *key) for key in format_reader.keys(variant)]


def test_the_reader_is_independent() -> None:
    tree = ast.parse(Path(format_reader.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    others = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert others == {"pyarrow", "xxhash"}


def test_it_finds_the_entries(variant: Path) -> None:
    assert format_reader.keys(variant) == [(key.step, key.gen_batch) for key in RolloutStore(str(variant))]


def test_it_gets_the_same_tokens_scores_and_columns(variant: Path, entries: list[Entry]) -> None:
    store = RolloutStore(str(variant))
    for key, entry in zip(KEYS, entries, strict=True):
        batch, inputs = store.get(key), store.inputs(key)
        assert entry.output == as_lists(batch)
        assert entry.input == as_lists(inputs)
        assert entry.rollout.meta("output") == batch.meta_info
        assert entry.rollout.meta("input") == inputs.meta_info
        assert entry.rollout.column("skip__score") == batch.batch["rm_scores"].sum(dim=1, dtype=torch.float64).tolist()
        assert entry.rollout.column("skip__response_length") == batch.batch["response_mask"].sum(dim=1).tolist()


def test_it_gets_the_same_digests(variant: Path, entries: list[Entry]) -> None:
    store = RolloutStore(str(variant))
    for key, entry in zip(KEYS, entries, strict=True):
        record = store.record(key)
        assert entry.record["parts"] == [asdict(part) for part in record.parts]
        assert entry.rollout.content() == record.content
        assert entry.rollout.prompt_digests() == store.load(key).prompt_digests()
        assert entry.record["info"] == record.info
        if "identity" in record.info:
            assert entry.rollout.identity() == record.info["identity"]
            assert format_reader.history(entries, key.step) == record.info["history"]


def test_it_reads_the_manifest_and_computes_its_hashes(training: Training, variant: Path) -> None:
    ((folder, fields),) = format_reader.variants(training.dumps).items()
    manifest = Manifest.load(str(variant))
    assert folder == variant
    assert fields["run_name"] == variant.parent.name == manifest.run_name
    assert format_reader.canonical_hash(fields["fingerprint"]) == fields["config_hash"] == manifest.config_hash
    assert format_reader.canonical_hash(fields["training"]) == fields["training_hash"] == manifest.training_hash
    assert variant.name == fields["config_hash"][:12]
    found = format_reader.trainings(variant)
    assert [item["steps"] for item in found] == [[1, 2, 3]]
    assert [{**item, "checksum": None} for item in found] == [{**item, "checksum": None} for item in manifest.trainings]


def test_the_hash_takes_letters_and_numbers_as_the_package_does() -> None:
    from verl_rollout_skip.fingerprint.fingerprint import flat_hash

    flat = {"b": 1e-6, "a": [1.0, True, "ü", "𝔘", None, 1e20, 0.1, 123456789.5], "c": {"z": -0.0, "y": 1e-5}}
    assert format_reader.canonical_hash(flat) == flat_hash(flat)


def test_it_reads_jagged_tensors(tmp_path: Path) -> None:
    rows = {"prompts": [[1, 2], [3]], "responses": [[4, 5, 6], [7]]}
    rows["input_ids"] = [[*left, *right] for left, right in zip(rows["prompts"], rows["responses"], strict=True)]
    rows["position_ids"] = [list(range(len(row))) for row in rows["input_ids"]]
    tensors = {name: [torch.tensor(row) for row in values] for name, values in rows.items()}
    jagged = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in tensors.items()}
    with RolloutStore(str(tmp_path)) as store:
        store.put(RolloutKey(1), TensorDict(jagged, batch_size=[2]))
    entry = Entry(tmp_path, 1, 0)
    assert entry.output == rows
    forms = {item["form"] for item in entry.description["output"]["numbers"]}
    assert forms == {"jagged", "jagged_concat", "jagged_positions"}


@pytest.mark.parametrize("cuts", [[], [1], [2, 5, 7]])
def test_it_joins_parts_and_finds_blobs(cuts: list[int]) -> None:
    output, inputs = rollout_output(8), rollout_input(8)
    images = [torch.arange(30_000, dtype=torch.float32) + row // 4 for row in range(8)]
    pictures = objects([{"pixels": image, "raw": (b"bytes", row)} for row, image in enumerate(images)])
    output.non_tensor_batch["pictures"], inputs.non_tensor_batch["pictures"] = pictures, pictures
    parts, summary = dump_parts(output, inputs, cuts)
    found = format_reader.Rollout(parts)
    expected = [
        {"pixels": ("float32", [30_000], image.numpy().tobytes()), "raw": (b"bytes", row)}
        for row, image in enumerate(images)
    ]
    assert found.output.pop("pictures") == found.input.pop("pictures") == expected
    assert sum(len(part.blobs) for part in found.parts) <= 3 * (len(cuts) + 1)
    assert found.content() == summary.content_digest
    del output.non_tensor_batch["pictures"], inputs.non_tensor_batch["pictures"]
    assert found.output == as_lists(output)
    assert found.input == as_lists(inputs)


def test_it_refuses_damage(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    (variant,) = training.variants()
    data = part_file(variant)
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with pytest.raises(DamagedError, match="another size or digest"):
        Entry(variant, 1, 0)
    manifest = variant / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": null', '"seed": 1'))
    with pytest.raises(DamagedError, match="checksum"):
        format_reader.read_json(manifest)


def test_the_examples_of_the_document_are_whole(tmp_path: Path) -> None:
    for number, block in enumerate(re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)):
        path = tmp_path / f"{number}.json"
        path.write_text(block, encoding="utf-8")
        format_reader.read_json(path)
    manifest, _ = EXAMPLES
    assert format_reader.canonical_hash(manifest["fingerprint"]) == manifest["config_hash"]
    assert format_reader.canonical_hash(manifest["training"]) == manifest["training_hash"]


def test_the_document_has_every_field(variant: Path, entries: list[Entry]) -> None:
    manifest, record = EXAMPLES
    recorded = json.loads((variant / "manifest.json").read_text())
    assert list(manifest) == list(recorded)
    assert list(record) == list(entries[0].record)
    (recording,) = format_reader.trainings(variant)
    explained = set(re.findall(r"`(\w+)`", DOCUMENT))
    assert not {*recorded, *recording, *entries[0].record, *entries[0].record["info"]} - explained


def as_lists(batch: Any) -> dict[str, Any]:
    tensors = {} if batch.batch is None else {name: tensor.tolist() for name, tensor in batch.batch.items()}
    return tensors | {name: values.tolist() for name, values in batch.non_tensor_batch.items()}
