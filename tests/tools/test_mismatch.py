"""The mismatch between rollout and training: verl's formulas, and what is shown by position, turn and token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo import rollout_corr_helper as verl

from verl_rollout_skip.errors import ConfigError, CorruptEntryError
from verl_rollout_skip.tools.mismatch import REJECTIONS, TRUNCATIONS, Kind, Rule, parse_rule
from verl_rollout_skip.tools.mismatch.groups import Sums
from verl_rollout_skip.tools.mismatch.log_probs import LogProbs, figures_of
from verl_rollout_skip.tools.mismatch.what_if import apply

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch(seed: int = 0, rows: int = 32, width: int = 40, spread: float = 0.4) -> Batch:
    """Log-probs of trainer and rollout with a few tokens far apart, and masks with the gaps of tool replies."""
    torch.manual_seed(seed)
    rollout = -torch.rand(rows, width) * 3
    old = rollout + torch.randn(rows, width) * spread * (torch.rand(rows, width) < 0.2)
    old[1, 2], old[2, 3] = rollout[1, 2] - 25, rollout[2, 3] + 24
    lengths = torch.randint(1, width + 1, (rows, 1))
    mask = (torch.arange(width) < lengths).long()
    mask[4:12, 5:9] = 0
    mask[0] = 0
    return old * (mask > 0), rollout * (mask > 0), mask


def log_probs_of(found: Batch) -> LogProbs:
    return LogProbs.of(*(list(tensor.numpy()) for tensor in found), what="The columns")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.01, 0.4, 3.0])
def test_figures_are_those_that_verl_logs(seed: int, spread: float) -> None:
    found = batch(seed, spread=spread)
    expected = verl.compute_offpolicy_metrics(*(tensor.double() for tensor in found))
    figures = figures_of(log_probs_of(found))
    assert figures is not None
    compared = {
        "kl": figures.k1,
        "k3_kl": figures.k3,
        "chi2_token": figures.chi2_token,
        "chi2_seq": figures.chi2_seq,
        "training_ppl": figures.training_ppl,
        "rollout_ppl": figures.rollout_ppl,
    }
    for name, value in compared.items():
        assert value == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [*TRUNCATIONS, parse_rule(Kind.TRUNCATION, "sequence:0.5_2")], ids=str)
def test_truncation_is_what_verl_would_do(rule: Rule, seed: int) -> None:
    old, rollout, mask = batch(seed)
    weights, expected = verl.compute_rollout_correction_weights(
        (old - rollout).double(), mask, rule.level, rule.threshold if rule.lower else rule.upper
    )
    effect = apply(rule, log_probs_of((old, rollout, mask)))
    ratio = torch.exp(torch.clamp((old - rollout).double(), -20, 20))
    if rule.level == "sequence":
        total = ((old - rollout).double() * mask).sum(-1, keepdim=True)
        ratio = torch.exp(torch.clamp(total, -20, 20)).expand_as(ratio)
    outside = ratio > rule.upper
    if rule.lower is not None:
        outside |= ratio < rule.lower
        assert effect.tokens == pytest.approx(expected["rollout_is_oob_ratio"], rel=1e-6)
    elif rule.level == "token":
        assert effect.tokens == pytest.approx(expected["rollout_is_ratio_fraction_high"], rel=1e-6)
    assert effect.tokens == pytest.approx((outside & (mask > 0)).sum().item() / mask.sum().item(), rel=1e-9)
    assert effect.mean_weight == pytest.approx(expected["rollout_is_mean"], rel=1e-6)
    assert effect.max_weight == pytest.approx(weights.max().item(), rel=1e-6)
    assert effect.effective == pytest.approx(expected["rollout_is_eff_sample_size"], rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "rule",
    [
        *REJECTIONS,
        *(
            parse_rule(Kind.REJECTION, text)
            for text in ("token_k1:3", "token_k2:0.1", "seq_sum_k2:1", "seq_sum_k3:0.5")
        ),
        *(parse_rule(Kind.REJECTION, text) for text in ("seq_mean_k2:0.01", "seq_max_k2:0.2")),
    ],
    ids=str,
)
def test_rejection_is_what_verl_would_do(rule: Rule, seed: int) -> None:
    old, rollout, mask = batch(seed)
    threshold = f"{rule.lower!r}_{rule.upper!r}" if rule.lower is not None else rule.upper
    kept, expected = verl.compute_rollout_rejection_mask((old - rollout).double(), mask, rule.level, threshold)
    effect = apply(rule, log_probs_of((old, rollout, mask)))
    assert effect.tokens == pytest.approx(1 - kept.sum().item() / mask.sum().item(), abs=1e-9)
    assert effect.tokens == pytest.approx(expected["rollout_rs_masked_fraction"], abs=1e-6)
    assert effect.sequences == pytest.approx(expected["rollout_rs_seq_masked_fraction"], abs=1e-6)
    assert 0 < effect.tokens < 1


def test_every_option_of_verl_is_known() -> None:
    for level in verl.SUPPORTED_ROLLOUT_RS_OPTIONS:
        assert parse_rule(Kind.REJECTION, f"{level}:2").level == level


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            Kind.TRUNCATION,
            "tokens:2",
            "'tokens:2' is not a rollout_is. Use LEVEL:THRESHOLD with one of token, sequence",
        ),
        (Kind.TRUNCATION, "token", "no valid threshold"),
        (Kind.TRUNCATION, "token:-1", "no valid threshold"),
        (Kind.TRUNCATION, "token:nan", "no valid threshold"),
        (Kind.TRUNCATION, "token:5_2", "no valid threshold"),
        (Kind.REJECTION, "seq_mean_k3:0.1_2", "has a lower bound, but seq_mean_k3 has only an upper one"),
        (Kind.REJECTION, "seq_max_k1:2", "is not a rollout_rs"),
    ],
)
def test_rule_that_verl_would_refuse_is_an_error(kind: Kind, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rule(kind, text)
    assert words in str(caught.value)


def test_equal_log_probs_have_no_mismatch() -> None:
    _, rollout, mask = batch()
    found = log_probs_of((rollout, rollout, mask))
    figures = figures_of(found)
    assert figures is not None
    assert (figures.k1, figures.k3, figures.mean_abs, figures.max_abs) == (0.0, 0.0, 0.0, 0.0)
    assert set(figures.percentiles.values()) == {1.0}
    assert set(figures.tails.values()) == {0.0}
    assert apply(TRUNCATIONS[0], found).tokens == 0.0


def test_tokens_without_a_finite_log_prob_are_counted_and_left_out() -> None:
    old, rollout, mask = batch()
    clean = log_probs_of((old, rollout, mask))
    assert mask[3, 0] == 1
    old[3, 0] = math.nan
    rollout[5, 0] = -math.inf
    found = log_probs_of((old, rollout, mask))
    assert found.nonfinite == 2
    assert found.tokens == clean.tokens - 2
    figures = figures_of(found)
    assert figures is not None
    assert math.isfinite(figures.k1)


def test_turns_are_the_parts_between_the_replies_of_tools() -> None:
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 1])
    found = LogProbs.of([np.zeros(8)], [np.ones(8)], [mask], "The columns")
    assert found.position.tolist() == [0, 1, 4, 6, 7]
    assert found.turn.tolist() == [0, 0, 1, 2, 2]


def test_mask_beyond_the_log_probs_is_damage() -> None:
    with pytest.raises(CorruptEntryError, match="selects token 8"):
        LogProbs.of([np.zeros(4)], [np.ones(8)], [np.ones(8, int)], "The columns")


def test_sums_over_several_updates_are_those_of_all_tokens() -> None:
    first, second = log_probs_of(batch(1, width=17)), log_probs_of(batch(2, width=40))
    sums = Sums()
    for found in (first, second):
        sums.add(found.position, found)
    positions = np.concatenate([first.position, second.position])
    ratio = np.concatenate([first.log_ratio, second.log_ratio])
    for group in (*sums.groups(), *sums.doubling()):
        chosen = ratio[(positions >= group.first) & (positions <= group.last)]
        assert group.tokens == len(chosen)
        assert group.k1 == pytest.approx(-chosen.mean())
        assert group.mean_abs == pytest.approx(np.abs(chosen).mean())
        assert group.max_abs == np.abs(chosen).max()
    assert [(group.first, group.last) for group in sums.doubling()] == [
        (0, 0),
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 31),
        (32, int(positions.max())),
    ]
    assert sum(group.tokens for group in sums.doubling()) == len(positions)
    assert sums.largest(3)[0].k3 * sums.largest(3)[0].tokens == max(g.k3 * g.tokens for g in sums.groups())


def test_padding_at_the_end_of_rows_does_not_matter(tmp_path: Path) -> None:
    old, rollout, mask = batch()
    whole = log_probs_of((old, rollout, mask))
    lengths = [max(int(row.nonzero().max()) + 1 if row.any() else 0, 0) for row in mask]
    cut: list[Any] = [
        [row.numpy()[:n] for row, n in zip(tensor, lengths, strict=True)] for tensor in (old, rollout, mask)
    ]
    found = LogProbs.of(*cut, what="The columns")
    assert figures_of(found) == figures_of(whole)
