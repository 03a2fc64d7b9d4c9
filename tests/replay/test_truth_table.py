"""What each mode does for each state of a step's entry."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.batches import assert_same_batch, rollout_output
from tests.entry_files import part_file
from tests.trainings import ROWS, RUN_NAME, Engine, Training, contents, inputs_of, without_timings
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import (
    CorruptEntryError,
    EntryExistsError,
    EntryNotFoundError,
    MismatchError,
    NewerFormatError,
    RolloutSkipError,
)
from verl_rollout_skip.store.format import FORMAT_VERSION

KEY, OTHER = RolloutKey(2), RolloutKey(1)


@dataclass(frozen=True)
class Outcome:
    """``batch``: where the batch comes from: the engine, the entry of this step, or that of another one.

    ``entry``: the entry of this step afterwards: as it was, none, or what was just generated (dumped into a free place,
    in place of the old one, or after the old one was set aside). ``generates``: the engine is called although the batch
    is from an entry.
    """

    batch: str = ""
    entry: str = "kept"
    generates: bool = False
    error: type[RolloutSkipError] | None = None
    words: str = ""


GENERATED = Outcome("engine", "kept")
DUMPED = Outcome("engine", "dumped")
REPLACED = Outcome("engine", "replaced")
SET_ASIDE = Outcome("engine", "set aside")
NEW_VARIANT = Outcome("engine", "new variant")
LOADED = Outcome("entry")
COMPARED = Outcome("entry", generates=True)
LOADED_OTHER = Outcome("other entry")
EXISTS = Outcome(
    error=EntryExistsError, words="step 2, .* already recorded .* 'cache' to continue .* 'refresh' to replace"
)
ABSENT = Outcome(
    error=EntryNotFoundError,
    words=r"step 2, .* not recorded .* Recorded steps: 1\. .*'replay'.*record more \(mode cache",
)
ABSENT_IN_SHADOW = Outcome(
    error=EntryNotFoundError,
    words=r"step 2, .* not recorded .* Recorded steps: 1\. .*'shadow' trains on recorded rollouts only",
)
CORRUPT = Outcome(
    error=CorruptEntryError, words="step 2, .* damaged: .*gen_000.*.parquet .* digest .* Record the step again"
)
NEWER = Outcome(error=NewerFormatError, words="format version 3, .* reads up to version 2.* Upgrade")
SETTINGS = Outcome(error=MismatchError, words="different settings:.*temperature: 1.0 → 0.7.*on_mismatch=reuse")
PROMPTS = Outcome(
    error=MismatchError, words="8 of 8 rows differ. The first is row 0:.*recorded .*current .*prompts=recorded"
)
ORDER = Outcome(error=MismatchError, words="rows differ; they are the same prompts in a different order .*row 0")
ROW_COUNT = Outcome(error=MismatchError, words="8 rows are recorded, but the current batch has 6")

TABLE: dict[str, dict[str, Outcome]] = {
    # state of the entry: mode → outcome
    "valid": {
        "off": GENERATED,
        "record": EXISTS,
        "cache": LOADED,
        "replay": LOADED,
        "repeat": LOADED,
        "repeat_last": LOADED,
        "refresh": REPLACED,
        "shadow": COMPARED,
    },
    "absent": {
        "off": GENERATED,
        "record": DUMPED,
        "cache": DUMPED,
        "replay": ABSENT,
        "repeat": LOADED_OTHER,
        "repeat_last": LOADED_OTHER,
        "refresh": DUMPED,
        "shadow": ABSENT_IN_SHADOW,
    },
    "corrupt": {
        "off": GENERATED,
        "record": EXISTS,
        "cache": SET_ASIDE,
        "replay": CORRUPT,
        "repeat": CORRUPT,
        "repeat_last": CORRUPT,
        "refresh": REPLACED,
        "shadow": CORRUPT,
    },
    "other fingerprint": {
        "off": GENERATED,
        "record": NEW_VARIANT,
        "cache": NEW_VARIANT,
        "replay": SETTINGS,
        "repeat": SETTINGS,
        "repeat_last": SETTINGS,
        "refresh": NEW_VARIANT,
        "shadow": SETTINGS,
    },
    "other prompts": {
        "off": GENERATED,
        "record": EXISTS,
        "cache": GENERATED,
        "replay": PROMPTS,
        "repeat": LOADED,
        "repeat_last": LOADED,
        "refresh": REPLACED,
        "shadow": PROMPTS,
    },
    "same prompts in another order": {
        "off": GENERATED,
        "record": EXISTS,
        "cache": GENERATED,
        "replay": ORDER,
        "repeat": LOADED,
        "repeat_last": LOADED,
        "refresh": REPLACED,
        "shadow": ORDER,
    },
    "other row count": {
        "off": GENERATED,
        "record": EXISTS,
        "cache": GENERATED,
        "replay": ROW_COUNT,
        "repeat": ROW_COUNT,
        "repeat_last": ROW_COUNT,
        "refresh": REPLACED,
        "shadow": ROW_COUNT,
    },
    "newer format": {
        "off": GENERATED,
        "record": EXISTS,
        "cache": SET_ASIDE,
        "replay": NEWER,
        "repeat": NEWER,
        "repeat_last": NEWER,
        "refresh": GENERATED,
        "shadow": NEWER,
    },
}
CASES = [pytest.param(state, mode, id=f"{mode}-{state}") for state, row in TABLE.items() for mode in row]


@pytest.mark.parametrize(("state", "mode"), CASES)
def test_truth_table(state: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TABLE[state][mode]
    training = Training(tmp_path)
    training.record(*([OTHER] if state == "absent" else [OTHER, KEY]))
    [variant] = training.variants()
    recorded = {key: RolloutStore(variant).get(key) for key in RolloutStore(variant)}
    spoil(state, variant, monkeypatch)
    before = contents(training.dumps)
    inputs = inputs_of(KEY)
    if state == "other prompts":
        inputs = inputs_of(RolloutKey(7))
    elif state == "same prompts in another order":
        inputs = inputs[np.arange(ROWS - 1, -1, -1)]
    elif state == "other row count":
        inputs = inputs_of(KEY, rows=6)
    changes = {"actor_rollout_ref__rollout__temperature": 0.7} if state == "other fingerprint" else {}
    engine = Engine()

    def run() -> object:
        with training.open(mode, **changes) as skip:
            return skip.step(KEY, inputs, engine)

    if expected.error is not None:
        with pytest.raises(expected.error) as caught:
            run()
        assert matches(expected.words, str(caught.value)), str(caught.value)
        assert engine.calls == 0
        assert contents(training.dumps) == before, "an error changes nothing on disk"
        return

    rollout = run()
    assert engine.calls == (expected.batch == "engine" or expected.generates)
    assert rollout.hit == (expected.batch != "engine")
    trained_on = {"engine": engine.last, "entry": recorded.get(KEY), "other entry": recorded[OTHER]}[expected.batch]
    assert_same_batch(without_timings(trained_on), without_timings(rollout.batch))
    CHECKS[expected.entry](training, variant, before, rollout.batch)


def spoil(state: str, variant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if state == "corrupt":
        data = part_file(variant, 2)
        data.write_bytes(data.read_bytes()[:-100])
    elif state == "newer format":
        with monkeypatch.context() as later:
            for module in ("codec.encoder", "record", "format"):
                later.setattr(f"verl_rollout_skip.store.{module}.FORMAT_VERSION", FORMAT_VERSION + 1)
            with RolloutStore(variant) as store:
                store.delete(KEY)
                store.put(KEY, rollout_output(ROWS), inputs=inputs_of(KEY))


def matches(words: str, text: str) -> bool:
    return re.search(words, text, re.DOTALL) is not None


def _kept(training: Training, variant: Path, before: dict[str, bytes], batch: object) -> None:
    after = contents(training.dumps)
    assert {name: data for name, data in after.items() if "trainings" not in name} == {
        name: data for name, data in before.items() if "trainings" not in name
    }


def _dumped(training: Training, variant: Path, before: dict[str, bytes], batch: object) -> None:
    assert_same_batch(without_timings(batch), without_timings(RolloutStore(variant).get(KEY)))
    assert RolloutStore(variant).keys() == [OTHER, KEY]
    assert not list(variant.rglob("*.corrupt"))


def _set_aside(training: Training, variant: Path, before: dict[str, bytes], batch: object) -> None:
    assert_same_batch(without_timings(batch), without_timings(RolloutStore(variant).get(KEY)))
    [aside] = variant.rglob("*.parquet.*.corrupt")
    name = aside.name.removesuffix(".corrupt").rpartition(".")[0]
    assert aside.read_bytes() == before[f"{RUN_NAME}/{variant.name}/step_000002/{name}"]


def _new_variant(training: Training, variant: Path, before: dict[str, bytes], batch: object) -> None:
    [new] = [other for other in training.variants() if other != variant]
    assert_same_batch(without_timings(batch), without_timings(RolloutStore(new).get(KEY)))
    assert contents(training.dumps).items() >= before.items(), "the other variant is as it was"


CHECKS: dict[str, Callable[..., None]] = {
    "kept": _kept,
    "dumped": _dumped,
    "replaced": _dumped,
    "set aside": _set_aside,
    "new variant": _new_variant,
}
