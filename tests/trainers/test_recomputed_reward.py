"""Recorded responses are scored with the same input to the reward function as when they were generated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from tests.batches import rollout_input, rollout_output
from verl_rollout_skip.trainers.v0.reward import recompute_rewards

ROWS = 4


class Letters:
    """A tokenizer."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return " ".join(str(int(token)) for token in tokens)


def reward_of_a_tool(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **_: Any) -> Any:
    """The fields that verl's multi-turn reward functions read: the output of tools."""
    return {"score": float(sum(extra_info["tool_rewards"])), "turns": len(extra_info["turn_scores"])}


class RewardLoop:
    """verl's own reward manager, row by row, as its reward workers call it; they need Ray."""

    def __init__(self) -> None:
        self._manager = NaiveRewardManager(
            config=OmegaConf.create({}), tokenizer=Letters(), compute_score=reward_of_a_tool
        )
        self.asked: DataProto | None = None

    def compute_rm_score(self, data: DataProto) -> DataProto:
        self.asked = data
        results = [
            self._manager.loop.run_until_complete(self._manager.run_single(data[row : row + 1]))
            for row in range(len(data))
        ]
        scores = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        scores[:, -1] = torch.tensor([result["reward_score"] for result in results])
        scored = DataProto.from_dict({"rm_scores": scores})
        scored.non_tensor_batch["turns"] = np.array([result["reward_extra_info"]["turns"] for result in results])
        scored.meta_info = {"reward_extra_keys": ["turns"]}
        return scored


def column(cells: list[Any]) -> np.ndarray:
    made = np.empty(len(cells), dtype=object)
    made[:] = cells
    return made


def recorded() -> tuple[DataProto, DataProto]:
    """A rollout of agent loops that call tools, and its input."""
    batch, inputs = rollout_output(ROWS), rollout_input(ROWS)
    batch.non_tensor_batch["tool_rewards"] = column([[0.5], [1.0, 2.0], [], [4.0]])
    batch.non_tensor_batch["turn_scores"] = column([[1], [1, 1], [], [1]])
    batch.non_tensor_batch["only_of_some"] = column(["here", None, None, None])
    return batch, inputs


def test_the_reward_function_gets_the_fields_of_tools_and_turns() -> None:
    batch, inputs = recorded()
    loop = RewardLoop()
    recompute_rewards(batch, inputs, SimpleNamespace(reward_loop_manager=loop))
    assert batch.batch["rm_scores"].sum(dim=-1).tolist() == [0.5, 3.0, 0.0, 4.0]
    assert batch.non_tensor_batch["turns"].tolist() == [1, 2, 0, 1]
    assert "acc" not in batch.non_tensor_batch, "an extra of the recorded reward function"
    assert batch.meta_info["reward_extra_keys"] == ["turns"]
    assert loop.asked is not None
    fields = loop.asked.non_tensor_batch["tool_extra_fields"]
    assert fields[0]["only_of_some"] == "here"
    assert "only_of_some" not in fields[1], "its agent loop did not return it"
    assert not {"acc", "uid", "reward_model", "__num_turns__"} & set(fields[0])


def test_lengths_are_those_of_the_tokens() -> None:
    batch, inputs = recorded()
    loop = RewardLoop()
    recompute_rewards(batch, inputs, SimpleNamespace(reward_loop_manager=loop))
    assert loop.asked is not None
    width = batch.batch["prompts"].shape[1]
    mask = batch.batch["attention_mask"]
    assert loop.asked.non_tensor_batch["prompt_len"].tolist() == mask[:, :width].sum(dim=1).tolist()
    assert loop.asked.non_tensor_batch["response_len"].tolist() == mask[:, width:].sum(dim=1).tolist()
