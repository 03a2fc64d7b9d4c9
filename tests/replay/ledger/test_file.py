"""Ledger files: what is written is read back exactly, whatever else is in the folder is a clear error."""

from __future__ import annotations

import json
import math
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.replay.ledger.lines import HEADER, TRAINING, a_step
from verl_rollout_skip.errors import LedgerError
from verl_rollout_skip.replay.ledger import file as ledger_file
from verl_rollout_skip.replay.ledger.file import LedgerFile, StepFinder, ledger_names, read_ledger
from verl_rollout_skip.replay.ledger.line import MAX_LINE, LedgerEnd, LineError, parse_line, render_line
from verl_rollout_skip.store.storage import Storage, open_storage

HARD_NUMBERS = {
    "nan": math.nan,
    "inf": math.inf,
    "minus inf": -math.inf,
    "smallest denormal": 5e-324,
    "another denormal": 2.2250738585072011e-308,
    "minus zero": -0.0,
    "a tenth": 0.1,
    "one plus a bit": 1 + 2**-52,
    "largest": 1.7976931348623157e308,
    "2**53 + 2": 2.0**53 + 2,
}


@pytest.fixture(params=["folder", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path) if request.param == "folder" else f"memory://ledgers-{uuid.uuid4().hex}")


def write(storage: Storage, *steps: int, end: bool = True) -> None:
    file = LedgerFile(storage, HEADER)
    for step in steps:
        file.append(a_step(step))
    if end:
        file.append(LedgerEnd("finished", len(steps)))


def lines_of(*steps: int) -> list[bytes]:
    return [render_line(HEADER), *(render_line(a_step(step)) for step in steps)]


def put(folder: Path, *lines: bytes) -> Storage:
    """A ledger with these bytes."""
    (folder / "ledgers").mkdir(exist_ok=True)
    (folder / "ledgers" / f"{TRAINING}.jsonl").write_bytes(b"".join(lines))
    return open_storage(str(folder))


def test_a_ledger_is_read_back_exactly(storage: Storage) -> None:
    write(storage, 1, 2, 5)
    ledger = read_ledger(storage, TRAINING)
    assert ledger_names(storage) == [TRAINING]
    assert ledger.header == HEADER
    assert ledger.steps == (a_step(1), a_step(2), a_step(5))
    assert (ledger.end, ledger.torn) == ("finished", None)


def test_every_number_comes_back_with_the_same_bits() -> None:
    read = parse_line(render_line(a_step(1, metrics=HARD_NUMBERS)))
    assert list(read.metrics) == list(HARD_NUMBERS)  # type: ignore[union-attr]
    assert [float.hex(value) for value in read.metrics.values()] == [  # type: ignore[union-attr]
        float.hex(value) for value in HARD_NUMBERS.values()
    ]


def test_lines_are_ascii_json_that_any_tool_reads() -> None:
    data = render_line(a_step(1, metrics={"müller/größe": math.nan}))
    assert data.isascii()
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    assert json.loads(data)["metrics"] == {"müller/größe": "nan"}


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_torn_last_line_is_ignored_and_reported(tmp_path: Path, kept: int) -> None:
    lines = lines_of(1, 2)
    storage = put(tmp_path, *lines[:-1], lines[-1][:kept])
    ledger = read_ledger(storage, TRAINING)
    assert [line.step for line in ledger.steps] == [1]
    assert ledger.end is None
    assert ledger.torn is not None
    assert "line 3 is incomplete" in ledger.torn


def test_the_ledger_of_a_training_that_was_killed_is_read_without_an_end(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    write(storage, 1, 2, end=False)
    ledger = read_ledger(storage, TRAINING)
    assert (len(ledger.steps), ledger.end, ledger.torn) == (2, None, None)


def a_changed_step(change: Callable[[dict[str, Any]], Any]) -> bytes:
    fields = json.loads(render_line(a_step(2)))
    change(fields)
    return json.dumps(fields).encode() + b"\n"


def nested(depth: int) -> bytes:
    return b'{"step":' + b"[" * depth + b"]" * depth + b"}\n"


HOSTILE = {
    "not JSON": (b"hello\n", "it is not JSON"),
    "no object": (b"[1]\n", "a JSON list, not an object"),
    "unknown kind": (b"{}\n", "neither a header nor a step nor an end"),
    "bare NaN": (a_changed_step(lambda line: line["metrics"].update(x=math.nan)), "NaN is not JSON"),
    "too large for a float": (b'{"step":2,"metrics":{"x":1e999}}\n', "metrics: x: inf is not a number"),
    "huge integer": (b'{"step":2,"metrics":{"x":' + b"9" * 400 + b"}}\n", "is not a number"),
    "unprintable integer": (b'{"step":2,"metrics":{"x":' + b"9" * 5000 + b"}}\n", "it is not JSON"),
    "a text as a number": (a_changed_step(lambda line: line["metrics"].update(x="12")), "metrics: x: '12' is not a"),
    "a list as a number": (a_changed_step(lambda line: line["metrics"].update(x=[1])), r"metrics: x: \[1\] is not a"),
    "true as a number": (a_changed_step(lambda line: line["metrics"].update(x=True)), "True is not a number"),
    "metrics in a list": (a_changed_step(lambda line: line.update(metrics=[])), "metrics: .* is not an object"),
    "negative step": (a_changed_step(lambda line: line.update(step=-1)), "step: -1 is not a count"),
    "no metrics": (a_changed_step(lambda line: line.pop("metrics")), "it has no metrics"),
    "a digest that is none": (
        a_changed_step(lambda line: line["tensors"]["values"].update(digest="../../etc")),
        "tensors: values: digest: '../../etc' is not a digest",
    ),
    "negative size": (a_changed_step(lambda line: line["tensors"]["values"].update(shape=[-3])), "shape: -3 is not a"),
    "endless shape": (a_changed_step(lambda line: line["tensors"]["values"].update(shape=[1] * 99)), "is not a shape"),
    "rollout of a wrong type": (a_changed_step(lambda line: line.update(rollouts=[7])), "7 is not an object"),
    "long name": (a_changed_step(lambda line: line["metrics"].update({"x" * 2000: 1})), "is not a short text"),
    "not ASCII": (b'{"step": "\xff"}\n', "it is not JSON"),
    "nested deeply": (nested(100_000), "it is not JSON"),
    "nested": (nested(400), "is not a count"),
    "same step twice": (render_line(a_step(1)), "step 1 follows step 1"),
    "earlier step": (render_line(a_step(0)), "step 0 follows step 1"),
    "second header": (render_line(HEADER), "second header"),
    "step after the end": (render_line(LedgerEnd("failed", 1)) + render_line(a_step(2)), "follows the end"),
    "unknown end": (b'{"end":"paused","steps":1}\n', "end is 'paused'"),
    "empty line": (b"\n", "it is not JSON"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_line_is_an_error_that_names_the_file_and_the_line(tmp_path: Path, kind: str) -> None:
    line, problem = HOSTILE[kind]
    storage = put(tmp_path, *lines_of(1), line)
    with pytest.raises(LedgerError, match=rf"{TRAINING}.jsonl is damaged in line [34]: .*{problem}"):
        read_ledger(storage, TRAINING)


def test_a_ledger_of_a_later_version_is_an_error_that_says_to_upgrade(tmp_path: Path) -> None:
    storage = put(tmp_path, lines_of()[0].replace(b'"ledger":1', b'"ledger":2'))
    with pytest.raises(LedgerError, match=r"it has version 2, but .* reads up to 1. Upgrade verl_rollout_skip"):
        read_ledger(storage, TRAINING)


def test_a_header_nested_deeply_is_an_error(tmp_path: Path) -> None:
    fields = json.loads(lines_of()[0])
    fields["gpu_layout"] = json.loads('{"a":' * 100 + "1" + "}" * 100)
    storage = put(tmp_path, json.dumps(fields).encode() + b"\n")
    with pytest.raises(LedgerError, match="gpu_layout: it is nested more than 20 levels deep"):
        read_ledger(storage, TRAINING)


@pytest.mark.parametrize("lines", [[], [b'{"ledger":1,"tra']])
def test_a_ledger_without_a_complete_header_is_an_error(tmp_path: Path, lines: list[bytes]) -> None:
    with pytest.raises(LedgerError, match="has no complete first line"):
        read_ledger(put(tmp_path, *lines), TRAINING)


def test_a_ledger_that_starts_with_a_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="damaged in line 1: it is not the header"):
        read_ledger(put(tmp_path, render_line(a_step(1))), TRAINING)


def test_a_missing_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="There is no ledger"):
        read_ledger(open_storage(str(tmp_path)), TRAINING)


@pytest.mark.parametrize("name", ["../manifest", "", "a/b", ".hidden", "x" * 200])
def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(LedgerError, match="is not the name of a training"):
        read_ledger(open_storage(str(tmp_path)), name)


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    storage = put(other, *lines_of(1))
    (tmp_path / "ledgers").symlink_to(other / "ledgers")
    with pytest.raises(LedgerError, match="symbolic link"):
        read_ledger(open_storage(str(tmp_path)), TRAINING)
    assert read_ledger(storage, TRAINING).steps


def test_a_line_without_end_is_an_error_in_bounded_memory(tmp_path: Path) -> None:
    storage = put(tmp_path, *lines_of(1), b'{"step":2,"metrics":{"' + b"x" * (40 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(LedgerError, match=r"line 3: it has more than 4.2 MB"):
            read_ledger(storage, TRAINING)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_LINE
    finally:
        tracemalloc.stop()


def test_a_ledger_without_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "MAX_BYTES", 2 << 20)
    storage = put(tmp_path, *lines_of(*range(1, 2000)))
    with pytest.raises(LedgerError, match=r"more than 2.1 MB, which no training writes"):
        read_ledger(storage, TRAINING)


def test_a_line_that_no_reader_accepts_is_never_written() -> None:
    metrics = {f"metric {number} {'x' * 900}": 1.0 for number in range(5000)}
    with pytest.raises(LineError, match="at most 4194304 are written"):
        render_line(a_step(1, metrics=metrics))


def test_single_steps_are_found_in_any_order(storage: Storage) -> None:
    write(storage, 1, 2, 4, 5)
    finder = StepFinder(storage, TRAINING)
    assert finder.header == HEADER
    assert [finder.find(step) for step in (2, 3, 4, 6)] == [a_step(2), None, a_step(4), None]
    assert [finder.find(step) for step in (1, 5, 5)] == [a_step(1), a_step(5), a_step(5)]


def test_steps_are_found_that_were_written_since(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    file = LedgerFile(storage, HEADER)
    file.append(a_step(1))
    finder = StepFinder(storage, TRAINING)
    assert finder.find(2) is None
    file.append(a_step(2))
    assert finder.find(2) == a_step(2)


def test_an_object_store_gets_the_whole_file_at_the_end_of_the_training() -> None:
    storage = open_storage(f"memory://ledgers-{uuid.uuid4().hex}")
    file = LedgerFile(storage, HEADER)
    file.append(a_step(1))
    file.append(a_step(2))
    assert len(read_ledger(storage, TRAINING).steps) == 1  # published at most every 30 seconds
    file.append(LedgerEnd("finished", 2))
    assert len(read_ledger(storage, TRAINING).steps) == 2
