"""The generation server of the cpu rollout: token ids in, token ids out, one request at a time.

A response depends only on the weights, the prompt, the sampling parameters and the seed, never on other requests: the
results of a batched forward pass would depend on the batch. This module does not import verl, so that its process
starts quickly; the results look like verl's TokenOutput.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from recipes.cpu import trace
from recipes.cpu.sampling import SamplingParams, fingerprint, next_token, seed_of

logger = logging.getLogger(__name__)

Version = int | None
"""The trainer's global step that the weights belong to; None if they are not from a trainer."""


@dataclass
class Generation:
    """One response, with the attributes of verl's TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    extra_fields: dict[str, Any]
    num_preempted: int | None = None
    routed_experts: None = None


@dataclass(frozen=True)
class ServerConfig:
    """The settings that the server uses from verl's rollout configuration."""

    model: str
    seed: int
    prompt_length: int
    response_length: int
    max_model_len: int
    dtype: str = "float32"
    ignore_eos: bool = False
    trust_remote_code: bool = False


class Generator:
    """A causal language model that generates one response at a time."""

    def __init__(self, config: ServerConfig) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(
            config.model,
            dtype=getattr(torch, config.dtype),
            attn_implementation="sdpa",
            trust_remote_code=config.trust_remote_code,
        ).eval()
        eos = self.model.generation_config.eos_token_id or self.model.config.eos_token_id
        self.eos = frozenset([eos] if isinstance(eos, int) else eos or ())

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Replace all weights; tied weights may be missing."""
        result = self.model.load_state_dict(weights, strict=False)
        missing = set(result.missing_keys) - set(self.model.all_tied_weights_keys)
        if missing or result.unexpected_keys:
            raise ValueError(
                f"the trainer's weights do not match the model: missing {sorted(missing)}, "
                f"unknown {sorted(result.unexpected_keys)}. Actor and rollout must use the same model"
            )

    @torch.inference_mode()
    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, generator: torch.Generator
    ) -> tuple[list[int], list[float]]:
        """Token ids up to and including the end token, and their log-probabilities."""
        tokens: list[int] = []
        log_probs: list[float] = []
        inputs, cache = torch.tensor([list(prompt_ids)]), None
        while len(tokens) < params.max_tokens:
            output = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token, log_prob = next_token(output.logits[0, -1], params, generator)
            tokens.append(token)
            log_probs.append(log_prob)
            if token in self.eos and not params.ignore_eos:
                break
            inputs, cache = torch.tensor([[token]]), output.past_key_values
        return tokens, log_probs


@dataclass
class Ordinals:
    """Counts how often the same request was made with one version of the weights."""

    version: Version = None
    seen: Counter[str] = field(default_factory=Counter)

    def next(self, version: Version, request: str) -> int:
        if version != self.version:
            self.version, self.seen = version, Counter()
        self.seen[request] += 1
        return self.seen[request] - 1


class CPUServer:
    """Answers requests of verl's agent loops. Runs as a Ray actor, or without Ray in a test.

    ``ordinal(version, request)`` asks the server that counts for all servers; without it, this server counts itself.
    """

    def __init__(
        self,
        config: ServerConfig,
        rank: int = 0,
        ordinal: Callable[[Version, str], Awaitable[int]] | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.generator = Generator(config)
        self.version: Version = None
        self.versions: list[Version] = []
        self.requests = 0
        self._ordinals = Ordinals()
        self._ordinal = ordinal or self.ordinal
        self._trace = trace.trace_file(f"server_{rank}")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        priority: int = 0,
    ) -> Generation:
        """Generate one response. ``request_id`` and ``priority`` are ignored."""
        if image_data or video_data:
            raise ValueError("the cpu rollout supports only text: remove images and videos from the data")
        prompt_ids = [int(token) for token in prompt_ids]
        params = self._params(prompt_ids, sampling_params)
        request = fingerprint(prompt_ids, params)
        ordinal = 0 if params.greedy else await self._ordinal(self.version, request)
        seed = seed_of(self.config.seed, self.version, request, ordinal)
        tokens, log_probs = self.generator.generate(prompt_ids, params, torch.Generator().manual_seed(seed))
        self.requests += 1
        trace.write(self._trace, "generate", self.version, self.requests)
        return Generation(
            token_ids=tokens,
            log_probs=log_probs if params.logprobs else None,
            stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )

    def _params(self, prompt_ids: Sequence[int], sampling_params: dict[str, Any]) -> SamplingParams:
        config = self.config
        room = config.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens, but max_model_len is {config.max_model_len}: "
                "there is no room for a response. Shorten the prompt or raise rollout.max_model_len"
            )
        total = config.prompt_length + config.response_length
        default = min(config.response_length, total - len(prompt_ids))
        return SamplingParams.parse({"ignore_eos": config.ignore_eos, **sampling_params}, default, room)

    async def load_weights(self, weights: dict[str, torch.Tensor], version: Version) -> None:
        """Load the trainer's weights after global step ``version``."""
        self.generator.load(weights)
        self.version = version
        self.versions.append(version)
        trace.write(self._trace, "sync", version, len(self.versions))
        logger.info("server %d has the weights of step %s", self.rank, version)

    async def ordinal(self, version: Version, request: str) -> int:
        """How often the same request was made before with these weights, across all servers."""
        return self._ordinals.next(version, request)

    async def counts(self) -> dict[str, Any]:
        """Counts of the requests and weight syncs of this server."""
        return {
            "requests": self.requests,
            "syncs": len(self.versions),
            "version": self.version,
            "versions": list(self.versions),
        }

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing to do: there is no cache to free, and no request is unfinished when another call arrives."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing
