"""Rollouts from real verl trainers are stored and restored exactly.

verl 0.9.1's outputs are assembled by its own code (``AgentLoopWorker``'s postprocessing, ``AgentLoopManager``'s
metrics, TransferQueue); only the inference server is left out: trajectories are made up. 0.6.1's synchronous rollout
needs vLLM and is not installed here: its batches are built by hand, following ``vllm_rollout_spmd.py`` of that version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopOutput, AgentLoopWorker
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils.torch_functional import get_response_mask
from verl.workers.config import RolloutConfig

from tests.batches import assert_same_batch, objects, rollout_input
from verl_rollout_skip import RolloutKey, RolloutStore

PROMPT_LENGTH, RESPONSE_LENGTH = 12, 20
PAD, EOS = 3, 2
KEY = RolloutKey(7)


def assert_store_returns(path: Path, output: Any, inputs: Any = None) -> None:
    """Record a rollout in the background as a trainer does, and read it with another store."""
    with RolloutStore(path) as store:
        store.put(KEY, output, inputs=inputs)
    with RolloutStore(path) as store:
        assert_same_batch(output, store.get(KEY))
        if inputs is not None:
            assert_same_batch(inputs, store.inputs(KEY))
        store.verify(KEY)


def agent_loop_worker(worker_class: type = AgentLoopWorker, colocated_reward: bool = False) -> Any:
    """A worker that can postprocess; ``__init__`` would need an inference server, a model and a whole config."""
    worker = worker_class.__new__(worker_class)
    vocabulary = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}, unk_token="<unk>"))
    worker.tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="</s>")
    worker.rollout_config = RolloutConfig(
        name="vllm", prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH, nnodes=1
    )
    worker.processor = None
    worker.mm_processor_kwargs = {}
    worker.distillation_enabled = False
    worker.reward_loop_worker_handles = None if colocated_reward else []
    return worker


def trajectory(rng: np.random.Generator, scored: bool = True, experts: bool = False) -> AgentLoopOutput:
    """What an agent loop returns: token lists of any length, here with a tool turn in the middle."""
    prompt_ids = rng.integers(4, 50_000, rng.integers(1, PROMPT_LENGTH + 1)).tolist()
    response_ids = rng.integers(4, 50_000, rng.integers(1, RESPONSE_LENGTH + 1)).tolist()
    response_mask = [0 if 3 <= place < 5 else 1 for place in range(len(response_ids))]
    extra_fields: dict[str, Any] = {"turn_scores": [], "tool_rewards": [0.5], "min_global_steps": 6}
    if scored:
        extra_fields["reward_extra_info"] = {"acc": bool(rng.integers(2)), "pred": "42", "penalty": -0.0}
    return AgentLoopOutput(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=response_mask,
        response_logprobs=(-rng.exponential(0.3, len(response_ids))).tolist(),
        routed_experts=rng.integers(0, 64, (len(prompt_ids) + len(response_ids) - 1, 4, 2)) if experts else None,
        reward_score=float(rng.normal()) if scored else None,
        num_turns=4,
        metrics=AgentLoopMetrics(generate_sequences=float(rng.random()), tool_calls=0.1, num_preempted=0),
        extra_fields=extra_fields,
    )


def generate(
    inputs: DataProto, *, workers: int = 2, colocated_reward: bool = False, experts: bool = False
) -> DataProto:
    """``AgentLoopManager.generate_sequences`` of verl 0.9.1, with made-up trajectories instead of a server's."""
    rng = np.random.default_rng(11)

    async def postprocess(worker: AgentLoopWorker, chunk: DataProto) -> list[Any]:
        outputs = []
        for row in range(len(chunk)):
            fields = {key: array[row] for key, array in chunk.non_tensor_batch.items()}
            made = trajectory(rng, scored=not colocated_reward, experts=experts)
            outputs.append(await worker._agent_loop_postprocess(made, validate=False, **fields))
        return outputs

    outputs = []
    for chunk in inputs.chunk(workers):
        worker = agent_loop_worker(colocated_reward=colocated_reward)
        made = asyncio.run(postprocess(worker, chunk))
        outputs.append(worker._postprocess(made, input_non_tensor_batch=chunk.non_tensor_batch))
    output = DataProto.concat(outputs)
    metrics = [chunk.meta_info.pop("metrics") for chunk in outputs]
    timing = AgentLoopManager.__new__(AgentLoopManager)._performance_metrics(metrics, output)
    output.meta_info = {"timing": timing, **outputs[0].meta_info}
    return output


def repeated_input(prompts: int = 3, samples: int = 4) -> DataProto:
    """The input of a rollout step as ``fit`` makes it: every prompt repeated for its samples, cells shared."""
    batch = rollout_input(2 * prompts)[::2]
    return batch.repeat(repeat_times=samples, interleave=True)


def test_the_output_of_verl_0_9_1_comes_back(tmp_path: Path) -> None:
    inputs = repeated_input()
    output = generate(inputs)
    assert output.batch["responses"].shape == (12, RESPONSE_LENGTH)
    assert type(output.meta_info["timing"]["agent_loop/generate_sequences/max"]) is np.float64
    assert output.non_tensor_batch["pred"].dtype.kind == "U"
    assert_store_returns(tmp_path, output, inputs)


def test_what_fit_does_with_the_output_afterwards_does_not_reach_the_dump(tmp_path: Path) -> None:
    inputs, output = repeated_input(), generate(repeated_input())
    expected = generate(repeated_input())
    with RolloutStore(tmp_path) as store:
        store.put(KEY, output, inputs=inputs)
        inputs.pop(non_tensor_batch_keys=["raw_prompt"])
        inputs.batch = TensorDict({"dummy_tensor": torch.zeros(12, 1)}, batch_size=[12])
        batch = inputs.union(output)
        batch.batch["token_level_scores"] = batch.batch.pop("rm_scores")
        batch.reorder(torch.randperm(12))
        output.meta_info.pop("timing")
        for info in batch.non_tensor_batch["extra_info"]:
            info["changed"] = True
    with RolloutStore(tmp_path) as store:
        assert_same_batch(expected, store.get(KEY))
        assert_same_batch(repeated_input(), store.inputs(KEY))


def test_routed_experts_come_back(tmp_path: Path) -> None:
    output = generate(repeated_input(), experts=True)
    assert output.batch["routed_experts"].shape == (12, PROMPT_LENGTH + RESPONSE_LENGTH, 4, 2)
    assert output.batch["routed_experts"].dtype is torch.int16
    assert_store_returns(tmp_path / "int16", output)
    output.batch["routed_experts"] = output.batch["routed_experts"].to(torch.uint8)
    assert_store_returns(tmp_path / "uint8", output)


def test_a_colocated_reward_model_makes_the_output_echo_the_input(tmp_path: Path) -> None:
    inputs = repeated_input()
    output = generate(inputs, colocated_reward=True)
    assert "rm_scores" not in output.batch
    assert set(inputs.non_tensor_batch) <= set(output.non_tensor_batch)
    assert_store_returns(tmp_path, output, inputs)


def test_the_combined_rollout_of_remax_comes_back(tmp_path: Path) -> None:
    prompts = rollout_input(6)[::2]
    sampled = prompts.repeat(repeat_times=2, interleave=True)
    sampled.non_tensor_batch["__do_sample__"] = np.ones(len(sampled), dtype=bool)
    greedy = prompts.slice(0, None)
    greedy.non_tensor_batch["__do_sample__"] = np.zeros(len(greedy), dtype=bool)
    inputs = DataProto.concat([sampled, greedy])
    output = generate(inputs, workers=3, colocated_reward=True)
    assert output.non_tensor_batch["__do_sample__"].tolist() == [True] * 6 + [False] * 3
    assert_store_returns(tmp_path / "bool", output, inputs)
    inputs.non_tensor_batch["__do_sample__"] = inputs.non_tensor_batch["__do_sample__"].astype(object)
    assert_store_returns(tmp_path / "object", output, inputs)


def vision_output(axes: int, dtype: torch.dtype) -> tuple[DataProto, DataProto]:
    """A rollout of a vision model. The positions follow Qwen's rule (1 in the padding, a grid over the image)."""
    inputs = repeated_input()
    output = generate(inputs)
    mask = output.batch["attention_mask"]
    positions = torch.clip(torch.cumsum(mask, 1) - 1, min=0)[:, None].repeat(1, axes, 1)
    positions[:, 1:] += torch.arange(axes - 1)[:, None] * (torch.arange(mask.shape[1]) % 3)
    output.batch["position_ids"] = torch.where(mask[:, None] == 1, positions, 1)
    images = [
        {
            "pixel_values": torch.randn(16, 24, generator=torch.Generator().manual_seed(prompt)).to(dtype),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "images_seqlens": torch.tensor([16]),
        }
        for prompt in range(3)
    ]
    output.non_tensor_batch["multi_modal_inputs"] = objects(images).repeat(4)
    return output, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axes", [3, 4])
def test_vision_rollouts_come_back_and_samples_share_their_images(
    tmp_path: Path, axes: int, dtype: torch.dtype
) -> None:
    output, inputs = vision_output(axes, dtype)
    assert_store_returns(tmp_path, output, inputs)
    with RolloutStore(tmp_path) as store:
        cells = store.get(KEY).non_tensor_batch["multi_modal_inputs"]
    assert cells[0] is cells[3]
    assert cells[0] is not cells[4]


def test_separate_images_per_trajectory_come_back(tmp_path: Path) -> None:
    output, inputs = vision_output(4, torch.bfloat16)
    cells = output.non_tensor_batch["multi_modal_inputs"]
    output.non_tensor_batch["multi_modal_inputs"] = objects([dict(cell) for cell in cells])
    assert_store_returns(tmp_path, output, inputs)


def sync_rollout(rows: int = 8, vision: bool = False) -> tuple[DataProto, DataProto]:
    """Input and output of ``actor_rollout_wg.generate_sequences`` of verl 0.6.1, made by hand (see above)."""
    rng = np.random.default_rng(5)
    lengths = np.repeat(rng.integers(1, PROMPT_LENGTH + 1, rows // 2), 2)
    attention_mask = torch.from_numpy((np.arange(PROMPT_LENGTH) >= (PROMPT_LENGTH - lengths)[:, None]).astype(np.int64))
    prompts = torch.where(attention_mask == 1, torch.from_numpy(rng.integers(4, 50_000, (rows, PROMPT_LENGTH))), PAD)
    position_ids = torch.clip(torch.cumsum(attention_mask, 1) - 1, min=0)
    if vision:
        position_ids = position_ids[:, None].expand(-1, 3, -1).contiguous()
    given = rollout_input(rows)
    given.batch = TensorDict(
        {"input_ids": prompts, "attention_mask": attention_mask, "position_ids": position_ids}, batch_size=[rows]
    )
    given.non_tensor_batch.pop("uid")
    given.non_tensor_batch["raw_prompt_ids"] = objects([row[row != PAD].tolist() for row in prompts])

    ends = rng.integers(0, RESPONSE_LENGTH, rows)
    responses = torch.from_numpy(rng.integers(4, 50_000, (rows, RESPONSE_LENGTH)))
    for row, end in enumerate(ends):
        responses[row, end] = EOS
        responses[row, end + 1 :] = PAD
    delta = torch.arange(1, RESPONSE_LENGTH + 1).unsqueeze(0).expand(rows, -1)
    if vision:
        delta = delta[:, None].expand(rows, 3, -1)
    response_mask = get_response_mask(responses, EOS, dtype=attention_mask.dtype)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=-1),
        "rollout_log_probs": torch.where(response_mask == 1, -torch.rand(rows, RESPONSE_LENGTH), -1.0),
        "attention_mask": torch.cat([attention_mask, response_mask], dim=-1),
        "position_ids": torch.cat([position_ids, position_ids[..., -1:] + delta], dim=-1),
    }
    kept = {key: array for key, array in given.non_tensor_batch.items() if key != "raw_prompt_ids"}
    timing = {"generate_sequences": 1.25, "generation_timing/max": 1.5, "generation_timing/topk_ratio": 0.125}
    return DataProto(TensorDict(tensors, batch_size=[rows]), kept, {"timing": timing}), given


@pytest.mark.parametrize("vision", [False, True], ids=["text", "vision"])
def test_the_synchronous_rollout_of_verl_0_6_1_comes_back(tmp_path: Path, vision: bool) -> None:
    output, inputs = sync_rollout(vision=vision)
    assert_store_returns(tmp_path, output, inputs)


def test_what_a_second_rollout_of_the_same_step_returned_is_another_entry(tmp_path: Path) -> None:
    first, second = generate(repeated_input()), sync_rollout()[0]
    with RolloutStore(tmp_path) as store:
        store.put(RolloutKey(1, 0), first)
        store.put(RolloutKey(1, 1), second)
    with RolloutStore(tmp_path) as store:
        assert_same_batch(first, store.get(RolloutKey(1, 0)))
        assert_same_batch(second, store.get(RolloutKey(1, 1)))


@pytest.fixture(scope="module")
def transfer_queue() -> Iterator[Any]:
    """A real TransferQueue on its own Ray cluster, with one storage unit because starting takes most of the time."""
    ray = pytest.importorskip("ray")
    queue = pytest.importorskip("transfer_queue")
    from omegaconf import OmegaConf

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield queue
        queue.close()
    finally:
        ray.shutdown()


def finish_trajectories(uids: list[str], experts: bool = False) -> list[str]:
    """Put trajectories into TransferQueue with the code of V1's agent-loop worker; returns their keys."""
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    worker = agent_loop_worker(AgentLoopWorkerTQ.__ray_actor_class__)
    rng = np.random.default_rng(13)
    given = rollout_input(2 * len(uids))[::2].non_tensor_batch

    async def finish() -> None:
        for row, uid in enumerate(uids):
            fields = {key: array[row] for key, array in given.items()} | {"uid": uid, "global_steps": 7}
            for session in range(2):
                made = trajectory(rng, experts=experts)
                await worker._agent_loop_postprocess(made, validate=False, session_id=session, **fields)

    asyncio.run(finish())
    return [f"{uid}_{session}_0" for session in range(2) for uid in uids]


def test_trajectories_of_v1_come_back_from_transfer_queue(tmp_path: Path, transfer_queue: Any) -> None:
    keys = finish_trajectories(["a", "b", "c"], experts=True)
    batch = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
    assert batch["prompts"].layout is torch.jagged
    assert batch["routed_experts"].dtype is torch.int16
    assert isinstance(batch.get("extra_fields"), NonTensorStack)
    assert_store_returns(tmp_path, batch)


def test_recorded_trajectories_can_be_put_into_transfer_queue_again(tmp_path: Path, transfer_queue: Any) -> None:
    keys = finish_trajectories(["d", "e"])
    recorded = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
    with RolloutStore(tmp_path) as store:
        store.put(KEY, recorded)
    with RolloutStore(tmp_path) as store:
        loaded = store.get(KEY)
    tags = [{"status": "success"} for _ in keys]
    transfer_queue.kv_batch_put(keys=keys, fields=loaded, tags=tags, partition_id="replayed")
    assert_same_batch(recorded, transfer_queue.kv_batch_get(keys=keys, partition_id="replayed"))


def put_fields(queue: Any, partition: str, rows: list[dict[str, Any]]) -> TensorDict:
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    keys = [f"row_{row}" for row in range(len(rows))]
    for key, fields in zip(keys, rows, strict=True):
        tag = [{"status": "success"}]
        queue.kv_batch_put(keys=[key], fields=list_of_dict_to_tensordict([fields]), tags=tag, partition_id=partition)
    batch: TensorDict = queue.kv_batch_get(keys=keys, partition_id=partition)
    return batch


@pytest.mark.parametrize("lengths", [[5, 9, 7], [6, 6, 6]], ids=["ragged", "equal"])
def test_position_ids_of_vision_models_come_back_from_transfer_queue(
    tmp_path: Path, transfer_queue: Any, lengths: list[int]
) -> None:
    rows = [
        {
            "input_ids": torch.arange(length),
            "position_ids": torch.arange(length).repeat(4, 1) + torch.arange(4)[:, None],
            "multi_modal_inputs": {
                "pixel_values": torch.randn(length, 8).bfloat16(),
                "image_grid_thw": torch.tensor([[1, 2, 2]]),
            },
        }
        for length in lengths
    ]
    batch = put_fields(transfer_queue, f"vision_{lengths[0]}", rows)
    assert batch["position_ids"].is_nested
    assert_store_returns(tmp_path, batch)
    with RolloutStore(tmp_path) as store:
        positions = store.get(KEY)["position_ids"].unbind()
    for row, position in zip(rows, positions, strict=True):
        assert torch.equal(row["position_ids"], position)


def test_fields_that_transfer_queue_cannot_make_jagged_come_back(tmp_path: Path, transfer_queue: Any) -> None:
    rows = [
        {
            "image": torch.randn(3, height, width),
            "either": torch.arange(height) if height > 2 else torch.ones(2, 2),
            "scalar": torch.tensor(float(width)),
            "maybe": None if height > 2 else torch.ones(3),
            "text": "🎈" * height,
        }
        for height, width in ((2, 5), (4, 3), (3, 3))
    ]
    batch = put_fields(transfer_queue, "images", rows)
    assert batch["image"].is_nested
    assert batch["image"].layout is torch.strided
    assert isinstance(batch.get("either"), NonTensorStack)
    assert_store_returns(tmp_path, batch)
