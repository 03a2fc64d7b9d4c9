"""A folder of format 1: nothing in it is read or changed, and every command says in one line what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.batches import rollout_output
from tests.entry_files import part_file, record_file
from tests.trainings import Engine, Training, contents, inputs_of
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.errors import ManifestError, OldFormatError, StoreError
from verl_rollout_skip.runs.checked_json import render as render_manifest
from verl_rollout_skip.store.new_files import sealed_json as render_record

K = RolloutKey(1)
SAID = "has format version 1, but this version of verl-rollout-skip reads only version 2. Record again"


def make_old(variant: Path) -> None:
    """The files that format 1 had: a manifest, and for each entry a record and one Parquet file with a fixed name."""
    manifest = variant / "manifest.json"
    fields = {**json.loads(manifest.read_text()), "format_version": 1}
    del fields["checksum"]
    manifest.write_bytes(render_manifest(fields))
    record, data = record_file(variant), part_file(variant)
    fields = {**json.loads(record.read_text()), "format_version": 1}
    (part,) = fields.pop("parts")
    del fields["checksum"]
    record.write_bytes(render_record({**fields, "digest": part["digest"], "bytes": part["bytes"]}))
    data.rename(data.with_name("gen_000.parquet"))


@pytest.fixture
def training(tmp_path: Path) -> Training:
    training = Training(tmp_path)
    training.record(K)
    make_old(training.variants()[0])
    return training


@pytest.mark.parametrize("mode", ["cache", "record", "refresh", "replay", "repeat"])
def test_a_training_says_so_before_it_starts_and_touches_nothing(training: Training, mode: str) -> None:
    before = contents(training.dumps)
    with pytest.raises(ManifestError) as caught, training.open(mode) as skip:
        skip.step(K, inputs_of(K), Engine())
    (line,) = str(caught.value).splitlines()
    assert f"{training.variants()[0]}/manifest.json {SAID}" in line
    assert contents(training.dumps) == before


def test_a_folder_that_has_lost_its_manifest_is_not_taken_for_an_empty_one(training: Training) -> None:
    (training.variants()[0] / "manifest.json").unlink()
    before = contents(training.dumps)
    with pytest.raises(ManifestError, match=r"format version 1.*Move the folder away"), training.open("cache") as skip:
        skip.step(K, inputs_of(K), Engine())
    assert contents(training.dumps) == before


def test_the_store_says_so_and_does_not_overwrite_it(training: Training) -> None:
    store = RolloutStore(training.variants()[0], background=False)
    before = contents(training.dumps)
    assert store.keys() == [K]
    for call in (store.get, store.inputs, store.record, store.verify, lambda key: store.put(key, rollout_output(4))):
        with pytest.raises(OldFormatError, match=SAID) as caught:
            call(K)
        assert str(record_file(store.path)) in str(caught.value)
    assert store.prune(older_than_s=-1) == []
    assert contents(training.dumps) == before


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("background", [False, True])
def test_an_entry_of_another_format_is_not_replaced(tmp_path: Path, version: int, background: bool) -> None:
    """A refresh with this version must not destroy what another version can still read."""
    with RolloutStore(tmp_path, background=False) as store:
        store.put(K, rollout_output(4))
    record = record_file(tmp_path)
    fields = {**json.loads(record.read_text()), "format_version": version}
    del fields["checksum"]
    record.write_bytes(render_record(fields))
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=f"(?s)format version {version}.*It was kept, and the new one was not written"):
        with RolloutStore(tmp_path, background=background) as store:
            store.put(K, rollout_output(4, seed=2), replace=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", ["ls", "verify", "stats", "show", "copy", "resume", "report"])
def test_the_program_says_so_in_one_line(training: Training, tmp_path: Path, capsys: Any, command: str) -> None:
    (variant,) = training.variants()
    more = {"copy": [str(tmp_path / "to")], "resume": ["--dry-run"]}
    more["report"] = ["-o", str(tmp_path / "r.html")]
    main([command, str(variant), *more.get(command, [])])
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if "format version 1" in line]
    assert any(SAID in line for line in lines), shown
    assert "Traceback" not in shown.out + shown.err
