"""Samples the next token as vLLM does, with random numbers that depend only on the request.

Independent of models, servers and verl: logits and sampling parameters in, a token and its log-probability out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

# Below this temperature, vLLM picks the most probable token.
GREEDY_BELOW = 1e-5

_KINDS = {"temperature": float, "top_k": int, "top_p": float, "logprobs": bool, "ignore_eos": bool, "seed": int}
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. ``seed`` distinguishes otherwise identical requests."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    logprobs: bool = False
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: a response has at least one token")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: it cannot be negative")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}: it must be a number of tokens, or -1 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1")

    @classmethod
    def parse(cls, params: Mapping[str, Any], default_max_tokens: int, limit: int) -> SamplingParams:
        """Parse the parameters of an agent loop; ``limit`` caps the number of tokens, as in verl's vLLM server."""
        rest = dict(params)
        for name, neutral in _NEUTRAL.items():
            value = rest.pop(name, neutral)
            if value != neutral:
                raise ValueError(f"the cpu rollout does not support {name}={value}: leave it at {neutral}")
        # SGLang's name for max_tokens
        max_new_tokens = rest.pop("max_new_tokens", default_max_tokens)
        max_tokens = rest.pop("max_tokens", max_new_tokens)
        # A configuration may have 1 instead of 1.0, which must not change the request.
        known = {name: kind(rest.pop(name)) for name, kind in _KINDS.items() if rest.get(name) is not None}
        unknown = [name for name, value in rest.items() if value is not None]
        if unknown:
            raise ValueError(f"the cpu rollout does not support the sampling parameters {', '.join(unknown)}")
        return cls(max_tokens=max(1, min(int(max_tokens), limit)), **known)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities of the next token after temperature, top-k and top-p; excluded tokens have -inf.

    Greedy requests get the unmodified distribution, as in vLLM.
    """
    logits = logits.double()
    if params.greedy:
        return torch.log_softmax(logits, -1)
    logits = logits / params.temperature
    if 0 < params.top_k < logits.numel():
        least = torch.topk(logits, params.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1:
        ordered, order = torch.sort(logits, descending=True, stable=True)
        probabilities = torch.softmax(ordered, -1)
        # A token stays if the more probable ones do not add up to top_p, so the most probable one always stays.
        before = probabilities.cumsum(-1) - probabilities
        logits = logits.masked_fill((before >= params.top_p)[order.argsort()], -torch.inf)
    return torch.log_softmax(logits, -1)


def next_token(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """The sampled token and its log-probability under the distribution it was drawn from."""
    log_probs = distribution(logits, params)
    if params.greedy:
        token = int(log_probs.argmax())
    else:
        token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
    return token, float(log_probs[token])


def fingerprint(prompt_ids: Sequence[int], params: SamplingParams) -> str:
    """A key that is equal for requests for the same tokens, with or without their log-probabilities."""
    text = json.dumps([list(prompt_ids), asdict(replace(params, logprobs=False))], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def seed_of(*parts: object) -> int:
    """A seed derived from values, the same in every process."""
    text = json.dumps([str(part) for part in parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
