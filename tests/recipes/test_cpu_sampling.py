"""Sampling as in vLLM, compared with a naive reference implementation."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from recipes.cpu.sampling import SamplingParams, distribution, fingerprint, next_token, seed_of


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities computed naively. The logits must be distinct."""
    weights = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p and top_p < 1:
            break
        kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), list(product([0.3, 1.0, 1.7], [-1, 1, 5, 1000], [0.1, 0.5, 0.93, 1.0]))
)
def test_temperature_then_top_k_then_top_p(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 3
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    ours = distribution(logits, params).exp()
    theirs = torch.tensor(reference(logits.tolist(), temperature, top_k, top_p), dtype=torch.float64)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)


def test_ties_with_the_last_top_k_token_are_kept() -> None:
    kept = distribution(torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0]), SamplingParams(max_tokens=1, top_k=2)).exp() > 0
    assert kept.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1e-6, "top_k": 3, "top_p": 0.4}])
def test_temperature_0_is_greedy_with_unscaled_log_probs(params: dict[str, float]) -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 1.9])
    token, log_prob = next_token(logits, SamplingParams(max_tokens=1, **params), torch.Generator())  # type: ignore[arg-type]
    assert token == 1
    assert log_prob == pytest.approx(float(logits.double().log_softmax(-1)[1]))


def test_token_frequencies_match_their_probabilities() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.7, top_k=4, top_p=0.95)
    logits, generator = torch.tensor([0.1, 1.0, -0.5, 0.8, 0.3, -2.0]), torch.Generator().manual_seed(3)
    expected = distribution(logits, params).exp()
    draws = [next_token(logits, params, generator) for _ in range(8000)]
    counts = torch.bincount(torch.tensor([token for token, _ in draws]), minlength=6) / len(draws)
    # four standard deviations of a binomial share
    assert ((counts - expected).abs() <= 4 * (expected * (1 - expected) / len(draws)).sqrt()).all()
    assert dict(draws) == {token: pytest.approx(float(expected[token].log())) for token, _ in draws}


def test_the_parameters_of_an_agent_loop_are_accepted() -> None:
    sent = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.0, "logprobs": True, "seed": 7}
    assert SamplingParams.parse(sent, default_max_tokens=16, limit=100) == SamplingParams(
        16, 0.8, 20, 0.9, True, seed=7
    )


@pytest.mark.parametrize(
    ("sent", "tokens"),
    [({}, 16), ({"max_tokens": 4}, 4), ({"max_new_tokens": 5}, 5), ({"max_tokens": 99}, 30), ({"max_tokens": 0}, 1)],
)
def test_the_length_of_a_response_is_bounded_as_in_verls_vllm_server(sent: dict[str, int], tokens: int) -> None:
    assert SamplingParams.parse(sent, default_max_tokens=16, limit=30).max_tokens == tokens


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"repetition_penalty": 1.2}, "does not support repetition_penalty=1.2: leave it at 1.0"),
        ({"stop": ["\n"], "min_tokens": 3}, "does not support the sampling parameters stop, min_tokens"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0 and at most 1"),
        ({"top_k": 0}, "top_k is 0: it must be a number of tokens, or -1 for all"),
        ({"temperature": -1}, "temperature is -1.0: it cannot be negative"),
        ({"temperature": math.nan}, "temperature is nan"),
    ],
)
def test_unsupported_parameters_are_rejected(sent: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams.parse(sent, default_max_tokens=16, limit=30)


def test_seeds_and_fingerprints_are_reproducible_across_processes() -> None:
    assert seed_of(1, "a", None) == 8065688312130044591
    assert len({seed_of(1, 12), seed_of(11, 2), seed_of(1, 1, 2), seed_of(2, 1), seed_of()}) == 5
    params = SamplingParams(max_tokens=4, seed=1)
    same = fingerprint([1, 2, 3], SamplingParams(max_tokens=4, seed=1))
    assert same == fingerprint([1, 2, 3], params)
    assert fingerprint([1, 2], params) != same != fingerprint([1, 2, 3], SamplingParams(max_tokens=4, seed=2))
