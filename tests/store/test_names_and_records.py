"""Keys, file names and records: what identifies a rollout, and what cannot be mistaken for it."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import rollout_output
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import CorruptEntryError, NewerFormatError, OldFormatError, UnreadableEntryError
from verl_rollout_skip.store import names
from verl_rollout_skip.store.record import EntryRecord, parse_record, record_bytes
from verl_rollout_skip.store.storage import local

KEYS = st.builds(RolloutKey, st.integers(0, 10**9), st.integers(0, 10**6))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_keys_are_ordered_by_step_and_then_by_generation_batch() -> None:
    keys = [RolloutKey(2), RolloutKey(10), RolloutKey(1, 11), RolloutKey(1, 2), RolloutKey(1)]
    assert sorted(keys) == [RolloutKey(1), RolloutKey(1, 2), RolloutKey(1, 11), RolloutKey(2), RolloutKey(10)]


def test_a_key_says_what_it_means() -> None:
    assert str(RolloutKey(7)) == "step 7, generation batch 0"
    assert RolloutKey(7) == RolloutKey(7, 0)
    assert len({RolloutKey(7), RolloutKey(7, 0), RolloutKey(7, 1)}) == 2
    assert pickle.loads(pickle.dumps(RolloutKey(7, 1))) == RolloutKey(7, 1)


@pytest.mark.parametrize("number", [np.int64(3), np.int32(3), np.uint8(3)])
def test_a_step_counted_by_numpy_makes_the_same_key(number: np.integer) -> None:
    key = RolloutKey(number, number)
    assert key == RolloutKey(3, 3)
    assert type(key.step) is int
    assert hash(key) == hash(RolloutKey(3, 3))


@pytest.mark.parametrize("value", [-1, True, False])
def test_a_negative_or_boolean_step_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"RolloutKey\.step must be an integer of 0 or more"):
        RolloutKey(value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"RolloutKey\.gen_batch must be an integer of 0 or more"):
        RolloutKey(0, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1", 1.0, None, "../1", [1]])
def test_a_step_that_is_not_an_integer_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        RolloutKey(value)  # type: ignore[arg-type]


@given(KEYS)
def test_names_lead_back_to_their_key(key: RolloutKey) -> None:
    assert names.parse_folder(names.folder_name(key)) == key.step
    part = names.part_name(key, "0123456789abcdef" * 2)
    assert names.parse_record(names.record_name(key)) == key.gen_batch
    assert names.parse_part(part) == key.gen_batch
    for name in (names.folder_name(key), part, names.record_name(key)):
        assert not names.is_set_aside(name)
        assert names.is_set_aside(f"{name}.abc123.corrupt") == name.startswith("gen_")
        assert "/" not in name
        assert name not in (".", "..")


@given(st.text(max_size=40) | st.from_regex(r"\A(step|gen)_[\d.]{1,9}(\.[0-9a-f]{31,33}\.parquet|\.json)?\Z"))
def test_other_names_are_not_parsed(name: str) -> None:
    step, gen_batch, part = names.parse_folder(name), names.parse_record(name), names.parse_part(name)
    assert step is None or names.folder_name(RolloutKey(step)) == name
    assert gen_batch is None or names.record_name(RolloutKey(0, gen_batch)) == name
    assert part is None or names.part_name(RolloutKey(0, part), name.split(".")[1]) == name


@pytest.mark.parametrize(
    "name",
    ["step_1", "step_0000001", "step_-00001", "step_00000١", "step_000001\n", "step_000001/", "Step_000001", "..", ""],
)
def test_a_folder_with_nearly_the_right_name_is_none(name: str) -> None:
    assert names.parse_folder(name) is None


@pytest.mark.parametrize(
    "name",
    ["gen_1.X", "gen_0001.X", "gen_00٠.X", "gen_000.X\n", ".gen_000.X", "gen_000", "a/gen_000.X"],
)
def test_a_file_with_nearly_the_right_name_is_none(name: str) -> None:
    assert names.parse_record(name.replace("X", "json")) is None
    assert names.parse_part(name.replace("X", f"{'0' * 32}.parquet")) is None


@pytest.mark.parametrize("digest", ["", "0" * 31, "0" * 33, "A" * 32, "٠" * 32, "../" + "0" * 29, "0" * 32 + "\n"])
def test_a_part_is_named_by_a_digest_and_nothing_else(digest: str) -> None:
    assert names.parse_part(f"gen_000.{digest}.parquet") is None
    assert not names.is_digest(digest)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> EntryRecord:
    store = RolloutStore(tmp_path_factory.mktemp("run"), background=False)
    store.put(RolloutKey(3, 1), rollout_output(8, seed=1), info={"generated_s": 1.5, "λ": ["ü", None]})
    return store.record(RolloutKey(3, 1))


def test_a_record_tells_what_was_recorded(record: EntryRecord) -> None:
    batch = rollout_output(8, seed=1)
    assert record.key == RolloutKey(3, 1)
    assert record.rows == 8
    assert record.response_tokens == int(batch.batch["response_mask"].sum())
    assert record.prompt_tokens == int(batch.batch["attention_mask"].sum()) - record.response_tokens
    assert record.mean_response_length == record.response_tokens / 8
    assert record.mean_score == pytest.approx(float(batch.batch["rm_scores"].sum(-1).mean()))
    assert record.info == {"generated_s": 1.5, "λ": ["ü", None]}
    assert record.encode_s > 0
    assert record.written_by.startswith("verl-rollout-skip ")


def test_a_record_is_readable_json(record: EntryRecord) -> None:
    fields = json.loads(record_bytes(record))
    assert fields["key"] == {"step": 3, "gen_batch": 1}
    assert fields["format_version"] == 2
    assert record_bytes(record).count(b"\n") > 10


def test_a_record_comes_back_as_it_was(record: EntryRecord) -> None:
    assert parse_record(record_bytes(record), record.key) == record


@given(key=KEYS, info=st.dictionaries(st.text(), JSON, max_size=4))
def test_any_record_comes_back_as_it_was(record: EntryRecord, key: RolloutKey, info: dict[str, object]) -> None:
    (part,) = record.parts
    written = replace(record, key=key, info=info, parts=(replace(part, file=names.part_name(key, part.digest)),))
    assert parse_record(record_bytes(written), key) == written


def test_any_changed_byte_of_a_record_is_noticed(record: EntryRecord) -> None:
    """Every single byte, changed to a few others: digits, quotes, white space, the checksum itself."""
    whole = record_bytes(record)
    chance = random.Random(1)
    for index in range(len(whole)):
        for byte in {whole[index] ^ 1, whole[index] ^ 0x20, ord("0"), ord(" "), chance.randrange(256)} - {whole[index]}:
            with pytest.raises(UnreadableEntryError):
                parse_record(whole[:index] + bytes([byte]) + whole[index + 1 :], record.key)


@pytest.mark.parametrize(
    "change", [b"", b"\n", b" ", b"{}"], ids=["cut", "one more line", "one more space", "one more object"]
)
def test_a_record_with_more_or_less_at_its_end_is_refused(record: EntryRecord, change: bytes) -> None:
    whole = record_bytes(record)
    with pytest.raises(CorruptEntryError):
        parse_record(whole + change if change else whole[:-1], record.key)


def test_the_record_of_another_key_says_that_it_was_moved(record: EntryRecord) -> None:
    with pytest.raises(CorruptEntryError, match="record of step 3, generation batch 1: the file was moved or renamed"):
        parse_record(record_bytes(record), RolloutKey(3, 2))


def test_a_record_of_a_later_version_asks_for_an_upgrade(record: EntryRecord) -> None:
    later = record_bytes(record).replace(b'"format_version": 2', b'"format_version": 3')
    with pytest.raises(NewerFormatError, match=r"format version 3.* Upgrade"):
        parse_record(later, record.key)


def test_a_record_of_format_1_says_what_to_do(record: EntryRecord) -> None:
    earlier = record_bytes(record).replace(b'"format_version": 2', b'"format_version": 1')
    with pytest.raises(OldFormatError, match=r"format version 1, .* reads only version 2. Record again"):
        parse_record(earlier, record.key)


HOSTILE_PARTS: dict[str, dict[str, Any]] = {
    "a path": {"file": "../../outside/gen_001.parquet"},
    "an absolute path": {"file": "/etc/passwd"},
    "the digest leads out": {"digest": "../" * 10 + "00", "file": "gen_001." + "../" * 10 + "00.parquet"},
    "another entry": {"file": f"gen_000.{'0' * 32}.parquet", "digest": "0" * 32},
    "another digest": {"file": f"gen_001.{'0' * 32}.parquet", "digest": "1" * 32},
    "upper case": {"file": f"gen_001.{'A' * 32}.parquet", "digest": "A" * 32},
    "no text": {"file": None},
    "a number as digest": {"digest": 7},
    "negative size": {"bytes": -1},
    "size is a text": {"bytes": "12"},
    "size is true": {"bytes": True},
    "fractional size": {"bytes": 12.0},
    "negative rows": {"rows": -8},
    "too few rows": {"rows": 7},
    "rows are a text": {"rows": "8"},
}


@pytest.mark.parametrize("name", HOSTILE_PARTS)
def test_a_record_that_lists_anything_but_a_part_of_its_own_entry_is_refused(record: EntryRecord, name: str) -> None:
    """As written by an attacker who knows the code: a correct checksum and a name that points elsewhere."""
    (part,) = record.parts
    forged = replace(record, parts=(replace(part, **HOSTILE_PARTS[name]),))
    with pytest.raises(CorruptEntryError):
        parse_record(record_bytes(forged), record.key)


@pytest.mark.parametrize("parts", [(), None, "x", ["x"], [None], [{}], {"file": "x"}, 3])
def test_a_record_without_a_list_of_parts_is_refused(record: EntryRecord, parts: Any) -> None:
    with pytest.raises(CorruptEntryError):
        parse_record(record_bytes(replace(record, parts=parts)), record.key)


def test_equal_parts_count_once(record: EntryRecord) -> None:
    (part,) = record.parts
    twice = replace(record, parts=(part, part), rows=16)
    assert parse_record(record_bytes(twice), record.key).bytes == part.bytes == record.bytes


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"3", b'"x"', b"{}", b"{", b"\xff", b'{"format_version": 2}'])
def test_bytes_that_are_not_a_record_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        parse_record(data, RolloutKey(1))


def test_the_temporary_file_of_a_process_that_has_ended_is_a_leftover() -> None:
    """Another process creates the name and has ended by the time of the check."""
    script = (
        "import os, tempfile\n"
        "from verl_rollout_skip.store.storage.local import LocalStorage\n"
        "staged = LocalStorage(tempfile.mkdtemp()).stage('step_000001')\n"
        "print(staged.temporary)\n"
    )
    name = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert local.writer_has_exited(name) is True


def test_the_temporary_file_of_a_living_process_is_not_a_leftover(tmp_path: Path) -> None:
    with local.LocalStorage(tmp_path).stage("step_000001") as staged:
        (name,) = os.listdir(tmp_path / "step_000001")
        assert names.parse_part(name) is None
        assert local.writer_has_exited(name) is False
        assert staged.measure()[0] == 0
    assert os.listdir(tmp_path / "step_000001") == [], "what was not published is discarded"


def be_on(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: machine)
    getattr(local._host, "cache_clear", lambda: None)()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("ip-10-0-1-23", "ip-10-0-12-3"),
        ("node-1-1", "node-11"),
        ("worker", "worker.local"),
        ("a-very-long-name-of-a-machine-in-a-cluster-0001", "a-very-long-name-of-a-machine-in-a-cluster-0002"),
        ("nöde", "nde"),
    ],
)
def test_the_temporary_file_of_another_machine_is_never_treated_as_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, there: str
) -> None:
    """On a shared file system, the process that writes it may be alive on another machine."""
    be_on(there, monkeypatch)
    with local.LocalStorage(tmp_path).stage("step_000001"):
        (name,) = os.listdir(tmp_path / "step_000001")
    name = name.replace(f"-{os.getpid()}-", "-999999999-")
    be_on(here, monkeypatch)
    assert local.writer_has_exited(name) is None
    monkeypatch.undo()
    getattr(local._host, "cache_clear", lambda: None)()


@pytest.mark.parametrize("name", [".tmp-", ".tmp-x", ".tmp-host-pid-token", ".tmp-host--1-token", ".tmp-a-1-2-3-4", ""])
def test_the_writer_of_a_malformed_temporary_name_is_unknown(name: str) -> None:
    assert local.writer_has_exited(name) is None
