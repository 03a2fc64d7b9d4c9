"""The generation server of recipes/cpu, without Ray: its responses, which depend only on the request."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipes.cpu.environment import REPOSITORY, TRACE_VARIABLE
from recipes.cpu.server import CPUServer, Generation, ServerConfig

VOCABULARY, END = 50, 0
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9, 3, 2]]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    """A model with random weights, for which every token is about equally likely."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, eos_token_id=END, bos_token_id=None, pad_token_id=None, **shape, **heads)
    ).save_pretrained(folder)
    return ServerConfig(model=str(folder), seed=1, prompt_length=8, response_length=12, max_model_len=20)


@pytest.fixture
def server(config: ServerConfig) -> CPUServer:
    return CPUServer(config)


def weights(server: CPUServer, seed: int) -> dict[str, torch.Tensor]:
    """Weights as a trainer sends them after some steps."""
    generator = torch.Generator().manual_seed(seed)
    state = server.generator.model.state_dict()
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


async def ask(server: CPUServer, prompt: Sequence[int], **params: Any) -> Generation:
    return await server.generate(prompt_ids=prompt, sampling_params={**SAMPLING, **params}, request_id="any")


def answer(server: CPUServer, prompt: Sequence[int], **params: Any) -> Generation:
    return asyncio.run(ask(server, prompt, **params))


def logits_after(server: CPUServer, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return server.generator.model(torch.tensor([list(ids)])).logits[0, -1].double()


def test_log_probs_are_those_of_the_sampled_distribution(server: CPUServer) -> None:
    for params in ({}, {"temperature": 0.5}, {"temperature": 2.0}, {"temperature": 0.0}):
        result = answer(server, PROMPTS[0], **params)
        assert result.log_probs is not None
        assert len(result.token_ids) == len(result.log_probs) > 1
        for position, (token, log_prob) in enumerate(zip(result.token_ids, result.log_probs, strict=True)):
            logits = logits_after(server, PROMPTS[0] + result.token_ids[:position])
            # A greedy response is reported with the plain probabilities, as in vLLM.
            expected = (logits / (params.get("temperature", 1.0) or 1.0)).log_softmax(-1)[token]
            assert log_prob == pytest.approx(float(expected), abs=1e-5)


def test_top_k_samples_only_the_most_probable_tokens(server: CPUServer) -> None:
    for seed in range(5):
        result = answer(server, PROMPTS[1], top_k=2, seed=seed)
        for position, token in enumerate(result.token_ids):
            assert token in logits_after(server, PROMPTS[1] + result.token_ids[:position]).topk(2).indices.tolist()


def test_a_greedy_response_is_deterministic_and_most_probable(server: CPUServer) -> None:
    result = answer(server, PROMPTS[0], temperature=0)
    for position, token in enumerate(result.token_ids):
        assert token == int(logits_after(server, PROMPTS[0] + result.token_ids[:position]).argmax())
    assert answer(server, PROMPTS[0], temperature=0) == answer(server, PROMPTS[0], temperature=0, seed=5) == result


def test_a_response_ends_with_the_end_token(server: CPUServer) -> None:
    results = [answer(server, [7], seed=seed).token_ids for seed in range(60)]
    ended = [tokens for tokens in results if END in tokens]
    assert ended, "60 responses of 12 tokens, each of them one of 50"
    assert all(tokens.index(END) == len(tokens) - 1 for tokens in ended)
    assert all(len(tokens) == 12 for tokens in results if END not in tokens)
    going_on = [answer(server, [7], seed=seed, ignore_eos=True).token_ids for seed in range(60)]
    assert {len(tokens) for tokens in going_on} == {12}


@pytest.mark.parametrize(
    ("prompt_length", "params", "expected"),
    [
        (5, {}, 12),
        (10, {}, 10),
        (5, {"max_tokens": 3}, 3),
        (5, {"max_new_tokens": 4}, 4),
        (5, {"max_tokens": 100}, 15),
        (19, {}, 1),
    ],
)
def test_a_response_is_as_long_as_in_verls_vllm_server(
    server: CPUServer, prompt_length: int, params: dict[str, int], expected: int
) -> None:
    result = answer(server, [2] * prompt_length, ignore_eos=True, **params)
    assert len(result.token_ids) == expected
    assert result.stop_reason == "completed"


def test_a_prompt_that_leaves_no_room_for_a_response_is_rejected(server: CPUServer) -> None:
    with pytest.raises(ValueError, match=r"prompt has 20 tokens, but max_model_len is 20: there is no room"):
        answer(server, [2] * 20)


def test_without_log_probs_the_tokens_are_the_same(config: ServerConfig) -> None:
    without, with_them = (answer(CPUServer(config), PROMPTS[0], logprobs=asked) for asked in (False, True))
    assert without.log_probs is None
    assert without.token_ids == with_them.token_ids


def requests() -> list[tuple[int, int]]:
    """Three samples of each prompt."""
    return [(prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(3)]


def answers(server: CPUServer, order: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Generation]:
    """Send all requests at once; they reach the server in this order."""

    async def ask_all() -> list[Generation]:
        return await asyncio.gather(*(ask(server, PROMPTS[prompt], seed=sample) for prompt, sample in order))

    return dict(zip(order, asyncio.run(ask_all()), strict=True))


def test_the_order_of_requests_does_not_matter(config: ServerConfig) -> None:
    one = answers(CPUServer(config), requests())
    other = answers(CPUServer(config), requests()[::-1])
    assert one == other
    assert len({tuple(result.token_ids) for result in one.values()}) == len(one)


def test_other_requests_do_not_change_a_response(config: ServerConfig) -> None:
    together = answers(CPUServer(config), requests())
    for prompt, sample in requests():
        assert answers(CPUServer(config), [(prompt, sample)]) == {(prompt, sample): together[prompt, sample]}


def test_a_different_rollout_seed_gives_different_responses(config: ServerConfig) -> None:
    one, other = answers(CPUServer(config), requests()), answers(CPUServer(replace(config, seed=2)), requests())
    assert all(one[request].token_ids != other[request].token_ids for request in requests())


def test_repeating_a_request_gives_a_different_sample(server: CPUServer) -> None:
    """Otherwise, a prompt whose samples were all filtered out would always return the same ones."""
    first, second = (answer(server, PROMPTS[0], seed=1).token_ids for _ in range(2))
    assert first != second


def test_samples_do_not_depend_on_earlier_generation(config: ServerConfig) -> None:
    """Steps 1 and 2 are skipped, so the first weights arrive after step 2."""
    whole, skipping = CPUServer(config), CPUServer(config)
    trained = {step: weights(whole, step) for step in range(3)}
    for step in (0, 1):
        asyncio.run(whole.load_weights(trained[step], step))
        answers(whole, requests() * 2)
    for server in (whole, skipping):
        asyncio.run(server.load_weights(trained[2], 2))
    assert answers(whole, requests()) == answers(skipping, requests())


def test_the_same_weights_at_a_different_step_give_different_samples(server: CPUServer) -> None:
    state = weights(server, 0)
    responses = []
    for step in (1, 2, 1):
        asyncio.run(server.load_weights(state, step))
        responses.append(answer(server, PROMPTS[0], seed=1).token_ids)
    assert responses[0] != responses[1]
    assert responses[0] == responses[2]


def test_two_servers_give_the_same_response(config: ServerConfig) -> None:
    alone = CPUServer(config)
    first = CPUServer(config, rank=0)
    second = CPUServer(config, rank=1, ordinal=first.ordinal)
    for step in (1, 2):
        state = weights(alone, step)
        for server in (alone, first, second):
            asyncio.run(server.load_weights(state, step))
        for number, (prompt, sample) in enumerate(requests() + requests()):
            asked = (first, second)[(number * 7 + step) % 3 % 2]
            assert answer(asked, PROMPTS[prompt], seed=sample) == answer(alone, PROMPTS[prompt], seed=sample)


def test_new_weights_change_responses_and_the_reported_version(server: CPUServer) -> None:
    before = answer(server, PROMPTS[0], temperature=0)
    assert before.extra_fields == {"global_steps": None}
    state = weights(server, 4)
    asyncio.run(server.load_weights(state, 4))
    after = answer(server, PROMPTS[0], temperature=0)
    assert after.extra_fields == {"global_steps": 4}
    assert after.token_ids != before.token_ids
    assert all(torch.equal(value, state[name]) for name, value in server.generator.model.state_dict().items())


def test_weights_of_a_different_model_are_rejected(server: CPUServer) -> None:
    state = weights(server, 0)
    state["model.layers.9.mlp"] = state.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unknown \['model.layers.9.mlp'\]"):
        asyncio.run(server.load_weights(state, 1))


def test_images_are_rejected(server: CPUServer) -> None:
    with pytest.raises(ValueError, match="only text"):
        asyncio.run(server.generate([1], dict(SAMPLING), "any", image_data=["picture"]))


def test_the_server_logs_and_records_its_work(
    config: ServerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "trace"))
    server = CPUServer(config, rank=3)
    asyncio.run(server.load_weights(weights(server, 0), 0))
    answers(server, requests()[:2])
    asyncio.run(server.load_weights(weights(server, 5), 5))
    answers(server, requests()[:1])
    counts = asyncio.run(server.counts())
    assert counts == {"requests": 3, "syncs": 2, "version": 5, "versions": [0, 5]}
    (file,) = (tmp_path / "trace").iterdir()
    assert file.name.startswith("server_3_")
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"kind": "sync", "version": 0, "number": 1},
        {"kind": "generate", "version": 0, "number": 1},
        {"kind": "generate", "version": 0, "number": 2},
        {"kind": "sync", "version": 5, "number": 2},
        {"kind": "generate", "version": 5, "number": 3},
    ]


def test_nothing_is_written_by_default(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    server = CPUServer(config)
    answer(server, PROMPTS[0])
    assert server._trace is None


def test_the_server_process_does_not_import_verl() -> None:
    """Importing verl would dominate its startup time."""
    code = "import recipes.cpu.server, sys; print({'verl', 'ray'} & {name.split('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
