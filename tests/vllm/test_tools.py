"""verl's tool_agent with vLLM: multi-turn conversations with a tool."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.training import (
    PPO,
    ROOT,
    VERL_V1,
    Finished,
    Trainings,
    assert_same_results,
    assert_same_weights,
    skip,
    skip_v1,
    variant_in,
)
from tests.vllm.checks import assert_no_engine, assert_weights_arrived
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 2
MODULE = "calculator_of_the_test"
SKIP: dict[str, Callable[[str, Path], tuple[str, ...]]] = {"v0": skip, "v1": skip_v1}


class ToolTraining:
    """The files of a user-defined tool, and the training that uses them."""

    def __init__(self, folder: Path, plain_python: str) -> None:
        sources = Path(__file__).parent
        self.code, self.config = folder / f"{MODULE}.py", folder / "tools.yaml"
        self.code.write_text((sources / "calculator.py").read_text())
        self.config.write_text((sources / "calculator.yaml").read_text().replace("MODULE", MODULE))
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
        self.entry_points = {"v0": replace(PPO, env=env), "v1": replace(VERL_V1, env=env)}
        self.plain = {
            name: replace(entry_point, python=plain_python) for name, entry_point in self.entry_points.items()
        }

    @property
    def settings(self) -> tuple[str, ...]:
        rollout = "actor_rollout_ref.rollout"
        return (
            f"trainer.total_training_steps={STEPS}",
            f"trainer.save_freq={STEPS}",
            "data.max_response_length=64",
            f"{rollout}.agent.default_agent_loop=tool_agent",
            f"{rollout}.multi_turn.enable=True",
            f"{rollout}.multi_turn.format=bare_number",
            f"{rollout}.multi_turn.max_assistant_turns=3",
            f"{rollout}.multi_turn.tool_config_path={self.config}",
            f"reward.custom_reward_function.path={self.code}",
        )


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory, plain_python: str) -> ToolTraining:
    return ToolTraining(tmp_path_factory.mktemp("tool"), plain_python)


@pytest.fixture(scope="module", params=["v0", "v1"])
def trainer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def recorded(trainings: Trainings, dumps: Path, tool: ToolTraining, trainer: str) -> Finished:
    settings = (*tool.settings, *SKIP[trainer]("record", dumps / trainer))
    return trainings.run(tool.entry_points[trainer], f"record-{trainer}", *settings)


def test_a_replay_of_conversations_is_the_recorded_training_to_the_last_bit(
    trainings: Trainings, recorded: Finished, dumps: Path, tool: ToolTraining, trainer: str
) -> None:
    assert_weights_arrived(recorded, STEPS)
    assert_conversations(dumps / trainer, trainer)
    replayed = trainings.run(
        tool.plain[trainer], f"replay-{trainer}", *tool.settings, *SKIP[trainer]("replay", dumps / trainer)
    )
    assert_no_engine(replayed)
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)
    assert recorded.results()[1]["num_turns/max"] == 6, "three answers, and what the calculator said to two of them"


def assert_conversations(dumps: Path, trainer: str) -> None:
    """Some conversations contain tokens of the tool, which are not trained on, and a score for each call."""
    batch = RolloutStore(variant_in(dumps)).get(RolloutKey(1))
    if trainer == "v0":
        masks = list(batch.batch["response_mask"])
        scores = batch.non_tensor_batch["turn_scores"].tolist()
        rewards = batch.non_tensor_batch["tool_rewards"].tolist()
    else:
        masks = batch["response_mask"].unbind()
        extras = batch["extra_fields"]
        scores, rewards = ([extra[name] for extra in extras] for name in ("turn_scores", "tool_rewards"))
    assert {len(row) for row in scores} >= {0, 2}
    assert {reward for row in rewards for reward in row} == {0.0, 0.25}
    for mask, row in zip(masks, scores, strict=True):
        learned = mask.nonzero().flatten()
        gaps = int((learned[1:] - learned[:-1] > 1).sum())
        assert gaps == len(row), "each call is followed by tokens of the tool, and those by another answer"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("code", 'f"{error:+d}"', 'f"{-error:+d}"'),
        ("config", "reward: 0.25", "reward: 0.5"),
    ],
)
def test_another_tool_is_a_miss_that_names_it(
    trainings: Trainings,
    recorded: Finished,
    dumps: Path,
    tool: ToolTraining,
    trainer: str,
    file: str,
    old: str,
    new: str,
) -> None:
    path: Path = getattr(tool, file)
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))
    try:
        refused = trainings.run(
            tool.plain[trainer],
            f"other-{file}-{trainer}",
            *tool.settings,
            *SKIP[trainer]("replay", dumps / trainer),
            fails=True,
        )
    finally:
        path.write_text(before)
    assert "actor_rollout_ref.rollout.multi_turn.tool_config_path: " in refused.log
    assert "WorkerDict" not in refused.actors
    assert refused.metrics() == {}
