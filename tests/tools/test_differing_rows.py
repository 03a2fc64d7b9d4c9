"""Which rows and tokens differ between the training columns of two trainings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.batches import rollout_output
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.modes import TrainingColumns as Level
from verl_rollout_skip.config.skip_config import SkipConfig
from verl_rollout_skip.replay.columns import TrainingColumns, rows_of
from verl_rollout_skip.replay.ledger.updates import UpdateSlice
from verl_rollout_skip.tools.decoding import TextDecoder
from verl_rollout_skip.tools.differing_rows import differing_tokens

STEP = RolloutKey(1)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def variant(tmp_path: Path) -> Path:
    with RolloutStore(tmp_path) as store:
        store.put(STEP, rollout_output())
    return tmp_path


def tensors() -> Tensors:
    batch = dict(rollout_output().batch.items())
    torch.manual_seed(0)
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        batch[name] = torch.randn(batch["responses"].shape) * batch["response_mask"]
    return batch


def dump(variant: Path, name: str, update: Tensors, order: list[int], level: Level = Level.LOG_PROBS) -> None:
    settings = SkipConfig(mode=Mode.CACHE, training_columns=level)
    columns = TrainingColumns(str(variant), name, settings)
    columns.add_rollout(STEP, lambda: rows_of(tensors()))
    balanced = {key: tensor[order] for key, tensor in update.items()}
    update_of_step = columns.begin_update(1, "actor")
    assert update_of_step is not None
    update_of_step.add(UpdateSlice(0, balanced, balanced))
    update_of_step.finish()
    columns.close()


@pytest.mark.parametrize("level", [Level.LOG_PROBS, Level.ALL])
def test_same_update_in_another_row_order_does_not_differ(variant: Path, level: Level) -> None:
    dump(variant, "a", tensors(), list(range(8)), level)
    dump(variant, "b", tensors(), [3, 1, 2, 0, 7, 6, 5, 4], level)
    assert differing_tokens(str(variant), "a", str(variant), "b", 1) == []


@pytest.mark.parametrize("level", [Level.LOG_PROBS, Level.ALL])
def test_changed_old_log_prob_is_named_with_its_row_token_and_text(variant: Path, level: Level) -> None:
    changed = tensors()
    row = int(changed["response_mask"].sum(-1).argmax())
    value = changed["old_log_probs"][row, 1].item()
    changed["old_log_probs"][row, 1] = torch.nextafter(torch.tensor(value), torch.tensor(9.0))
    dump(variant, "a", tensors(), list(range(8)), level)
    dump(variant, "b", changed, [3, 1, 2, 0, 7, 6, 5, 4], level)
    [found] = differing_tokens(str(variant), "a", str(variant), "b", 1)
    assert (found.tensor, found.rows, found.place, found.position) == ("old_log_probs", 1, (0, row), 1)
    assert found.recorded == value
    assert found.current == changed["old_log_probs"][row, 1].item()
    responses = tensors()["responses"][row].tolist()
    assert (found.before, found.token, found.after[0]) == ((responses[0],), responses[1], responses[2])
    assert f"row {row}, token 1: {value!r} -> " in found.describe()
    decoder = TextDecoder("here", lambda tokens, _: "".join(f"<{token}>" for token in tokens))
    assert f"at <{responses[0]}>⟦<{responses[1]}>⟧<{responses[2]}>" in found.describe(decoder)


def test_several_tensors_are_listed_each_with_its_number_of_rows(variant: Path) -> None:
    changed = tensors()
    changed["ref_log_prob"][:, 0] += 1
    changed["old_log_probs"][5, 0] = float("nan")
    dump(variant, "a", tensors(), list(range(8)))
    dump(variant, "b", changed, list(range(8)))
    found = {different.tensor: different for different in differing_tokens(str(variant), "a", str(variant), "b", 1)}
    assert {name: different.rows for name, different in found.items()} == {"old_log_probs": 1, "ref_log_prob": 8}
    assert found["ref_log_prob"].place == (0, 0)


def test_signed_zeros_and_nans_are_compared_by_their_bits(variant: Path) -> None:
    zeros, nans = tensors(), tensors()
    for batch, value in ((zeros, 0.0), (nans, float("nan"))):
        batch["old_log_probs"][0, 0] = value
    dump(variant, "zero", zeros, list(range(8)))
    zeros["old_log_probs"][0, 0] = -0.0
    dump(variant, "minus", zeros, list(range(8)))
    for name in ("nan", "same"):
        dump(variant, name, nans, list(range(8)))
    assert [found.position for found in differing_tokens(str(variant), "zero", str(variant), "minus", 1)] == [0]
    assert differing_tokens(str(variant), "nan", str(variant), "same", 1) == []


def test_training_without_columns_cannot_be_compared(variant: Path) -> None:
    dump(variant, "a", tensors(), list(range(8)))
    assert differing_tokens(str(variant), "a", str(variant), "b", 1) == []
