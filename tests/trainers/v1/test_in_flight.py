"""Prompts in flight: drawn, sampled, dropped, put back; and the metrics of several samples in a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils.tensordict_utils import assign_non_tensor_data, get_tensordict

from verl_rollout_skip.errors import InertError, UnsupportedBatchError
from verl_rollout_skip.trainers.v1.dataloader import PushBack
from verl_rollout_skip.trainers.v1.in_flight import InFlight
from verl_rollout_skip.trainers.v1.metrics import of_step


def batch(*numbers: int, run: str = "run", step: int = 1) -> TensorDict:
    """Prompts in the form of V1's dataloader."""
    cells = [[{"role": "user", "content": f"{number}+1="}] for number in numbers]
    raw_prompt = np.empty(len(cells), dtype=object)
    raw_prompt[:] = cells
    made = get_tensordict(
        {
            "raw_prompt": raw_prompt,
            "index": np.array(numbers, dtype=object),
            "image": torch.tensor([[number, 2] for number in numbers]),
            "uid": np.array([f"{run}-{number}" for number in numbers], dtype=object),
        }
    )
    assign_non_tensor_data(made, "global_steps", step)
    return made


def in_flight(*numbers: int, run: str = "run") -> InFlight:
    prompts = InFlight()
    prompts.add(batch(*numbers, run=run))
    return prompts


def digests(prompts: InFlight) -> list[str]:
    return [prompt.digest for prompt in prompts.drawn]


def test_the_same_prompts_have_the_same_digests_in_other_runs_steps_and_batches() -> None:
    together, alone = in_flight(1, 2, 3), InFlight()
    for number in (1, 2, 3):
        alone.add(batch(number, run="another", step=7))
    assert digests(together) == digests(alone)
    assert len(set(digests(together))) == 3


@pytest.mark.parametrize("change", ["raw_prompt", "index", "image"])
def test_any_changed_column_changes_the_digest(change: str) -> None:
    other = batch(1, 2)
    other.set(change, batch(5, 2).get(change))
    changed = InFlight()
    changed.add(other)
    same = [old == new for old, new in zip(digests(in_flight(1, 2)), digests(changed), strict=True)]
    assert same == [False, True]


def test_rows_are_repeated_as_often_as_they_were_sampled() -> None:
    rows = in_flight(1, 2, 3).rows([2, 0, 2])
    assert rows["index"] == [3, 1, 3]
    assert rows["uid"] == ["run-3", "run-1", "run-3"]
    assert rows["image"].tolist() == [[3, 2], [1, 2], [3, 2]]
    assert "global_steps" not in rows.keys()  # noqa: SIM118


def test_sampled_and_dropped_prompts_are_gone_and_the_others_are_no_longer_new() -> None:
    prompts = in_flight(1, 2, 3, 4)
    gone = prompts.gone(sampled=["run-2"], waiting=["run-3", "run-4"])
    assert gone == [0, 1]
    prompts.settle(gone)
    prompts.add(batch(5))
    assert prompts.positions(["run-4", "run-5"]) == [1, 2]
    assert [prompt.uid for prompt in prompts.drawn] == ["run-5"]


def test_prompts_of_a_checkpoint_are_in_flight_but_not_drawn() -> None:
    prompts = InFlight()
    prompts.restore(batch(1, 2))
    prompts.add(batch(3))
    assert len(prompts) == 3
    assert [prompt.uid for prompt in prompts.drawn] == ["run-3"]


def test_a_prompt_that_was_never_drawn_is_an_error() -> None:
    with pytest.raises(InertError, match="'run-9' did not pass through"):
        in_flight(1).positions(["run-9"])


class Loader:
    """A dataloader of chunks with one or two prompts."""

    def __init__(self) -> None:
        self.chunks = [batch(1, 2), batch(3), batch(4)]
        self.drawn = 0

    def fetch(self) -> TensorDict:
        self.drawn += 1
        return self.chunks[self.drawn - 1]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}


def test_chunks_that_were_put_back_are_drawn_again_in_their_order() -> None:
    loader, ahead = Loader(), PushBack()
    assert ahead.next() is None
    ahead.draw(loader.fetch, loader.state_dict)
    ahead.draw(loader.fetch, loader.state_dict)
    assert ahead.put_back() == 3
    again = [ahead.draw(loader.fetch, loader.state_dict)["index"] for _ in range(3)]
    assert again == [[1, 2], [3], [4]]
    assert [chunk["index"] for chunk in ahead.keep()] == again
    assert ahead.put_back() == 0
    assert ahead.next() is None


def test_a_saved_dataloader_has_the_state_before_the_chunks_that_were_put_back() -> None:
    loader, ahead = Loader(), PushBack()
    loader.fetch()
    for _ in range(2):
        ahead.draw(loader.fetch, loader.state_dict)
    ahead.put_back()
    for drawn in (1, 2, 3):
        with ahead.rewound(loader):
            assert loader.state_dict() == {"drawn": drawn}
        assert loader.state_dict() == {"drawn": 3}
        ahead.next()


def test_seconds_of_several_samples_add_up_and_hits_are_averaged() -> None:
    samples = [
        {"rollout_skip/hit": 1.0, "rollout_skip/load_s": 0.5, "rollout_skip/dump_failures": 0.0},
        {"rollout_skip/hit": 0.0, "rollout_skip/load_s": 0.25, "rollout_skip/dump_failures": 1.0},
    ]
    assert of_step(samples) == {
        "rollout_skip/hit": 0.5,
        "rollout_skip/load_s": 0.75,
        "rollout_skip/dump_failures": 1.0,
    }
    assert of_step([]) == {}


def test_a_prompt_that_cannot_be_stored_is_an_error_only_when_its_digest_is_requested() -> None:
    odd = batch(1, 2)
    odd.set("labels", NonTensorStack.from_list([NonTensorData({1, 2}), NonTensorData({3})]))
    prompts = InFlight()
    prompts.add(odd)
    assert prompts.positions(["run-2"]) == [1]
    with pytest.raises(UnsupportedBatchError, match="labels"):
        digests(prompts)
