"""Makes the dumps next to this file with verl's own rollout skip. Run it with the interpreter of each version of verl.

    python tests/upstream_dumps/make.py tests/upstream_dumps

The values follow from a formula, so that the tests know what the dumps must hold without reading pickles.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

ROWS, PROMPT, RESPONSE = 4, 3, 5
CALLS = ({"validate": True}, {"global_steps": 1}, {"global_steps": 2})
"""The generate calls of a training that validates first: meta_info of their inputs."""


def output(call: int) -> dict[str, Any]:
    """The tensors and arrays that a generate call returns, as numpy arrays."""
    places = np.arange(ROWS * RESPONSE, dtype=np.int64).reshape(ROWS, RESPONSE)
    prompts = np.arange(ROWS * PROMPT, dtype=np.int64).reshape(ROWS, PROMPT) + 100
    scores = np.zeros((ROWS, RESPONSE), np.float32)
    scores[:, -1] = np.arange(ROWS) % 2
    mask = np.ones((ROWS, PROMPT + RESPONSE), np.int64)
    return {
        "prompts": prompts,
        "responses": places + 1000 * (call + 1),
        "attention_mask": mask,
        "rollout_log_probs": (-places / 7).astype(np.float32),
        "rm_scores": scores,
    }


def cells(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def output_columns(call: int) -> dict[str, np.ndarray]:
    pixels = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) + call
    return {
        "acc": np.arange(ROWS) % 2 == 1,
        "__num_turns__": np.full(ROWS, 2, np.int32),
        "multi_modal_inputs": cells([{"pixel_values": pixels}, {}, {"grid": np.arange(3)}, {}]),
        "data_source": np.array(["arithmetic"] * ROWS),
    }


def input_columns(call: int) -> dict[str, np.ndarray]:
    shared = [{"style": "rule", "ground_truth": f"{call} + {prompt}"} for prompt in range(ROWS // 2)]
    return {
        "raw_prompt": cells([[{"role": "user", "content": f"What is {call} + {row // 2}?"}] for row in range(ROWS)]),
        "reward_model": cells([shared[row // 2] for row in range(ROWS)]),
        "uid": cells([f"uid-{call}-{row // 2}" for row in range(ROWS)]),
    }


def data_proto(tensors: dict[str, np.ndarray] | None, columns: dict[str, np.ndarray], meta: dict[str, Any]) -> Any:
    from verl import DataProto

    batch = None
    if tensors is not None:
        batch = TensorDict({key: torch.from_numpy(value) for key, value in tensors.items()}, batch_size=[ROWS])
    return DataProto(batch=batch, non_tensor_batch=columns, meta_info=meta)


def generated(call: int) -> Any:
    meta = {"timing": {"generate": 0.5}, "reward_extra_keys": ["acc"]}
    return data_proto(output(call), output_columns(call), meta)


class Engine:
    """Returns the outputs in turn."""

    def __init__(self) -> None:
        self.calls = 0

    def generate_sequences(self, prompts: Any) -> Any:
        self.calls += 1
        return generated(self.calls - 1)


def config(**rollout: Any) -> Any:
    from omegaconf import OmegaConf

    names = {"experiment_name": "exp", "project_name": "proj"}
    data = {"gen_batch_size": 2, "train_batch_size": 2, "max_prompt_length": PROMPT, "max_response_length": RESPONSE}
    return OmegaConf.create(
        {
            "trainer": {**names, "v1": {"trainer_mode": "sync", "sync": {}}},
            "data": {**names, **data},
            "actor_rollout_ref": {"rollout": {"n": 2, **rollout}},
        }
    )


def run_calls(skip: Any, engine: Engine) -> None:
    """Wrap the engine as the trainer does, and call it as in a training with validation."""
    skip.wrap_generate_sequences()
    for call, meta in enumerate(CALLS):
        engine.generate_sequences(data_proto(None, input_columns(call), dict(meta)))


def make_old(folder: Path) -> None:
    from verl.utils.rollout_skip import RolloutSkip

    engine = Engine()
    run_calls(RolloutSkip(config(skip_rollout=True, skip_dump_dir=str(folder)), engine), engine)


def make_gen_steps(folder: Path) -> None:
    from verl.utils.rollout_skip import RolloutSkip

    skip = {"enable": True, "dump_dir": str(folder), "max_dump_step": 9, "action": "cache"}
    engine = Engine()
    run_calls(RolloutSkip(config(skip=skip), engine), engine)


def make_steps(folder: Path) -> None:
    from verl.utils.skip.config import RolloutSkipConfig
    from verl.utils.skip.rollout_skip import RolloutSkip

    skip = RolloutSkip(RolloutSkipConfig(enable=True, dump_dir=str(folder), steps=[1, 2]), config())
    for call, meta in enumerate(CALLS[1:], 1):
        skip.prepare_data(meta["global_steps"], generated(call))


def make_sampled(folder: Path) -> None:
    import transfer_queue
    from tensordict import NonTensorStack
    from transfer_queue import KVBatchMeta
    from verl.utils.skip.config import RolloutTqSkipConfig
    from verl.utils.skip.rollout_skip import RolloutTqSkip

    skip = RolloutTqSkip(RolloutTqSkipConfig(enable=True, dump_dir=str(folder), steps=[1, 2]), config())
    for call, meta in enumerate(CALLS[1:], 1):
        tensors = output(call)
        held = TensorDict(
            {
                name: torch.nested.nested_tensor([torch.from_numpy(row) for row in tensors[name]], layout=torch.jagged)
                for name in ("prompts", "responses", "rm_scores")
            },
            batch_size=[ROWS],
        )
        held.set("raw_prompt", NonTensorStack(*input_columns(call)["raw_prompt"]))
        # TransferQueue is a cluster of Ray actors; the dump uses only what it returns.
        transfer_queue.kv_batch_get = lambda held=held, **asked: held
        keys = [f"uid-{call}-{row // 2}_{row % 2}_0" for row in range(ROWS)]
        tags = [{"status": "finished", "seq_len": 8} for _ in range(ROWS)]
        batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train")
        skip.prepare_data(meta["global_steps"], batch, meta["global_steps"])


def main(root: Path) -> None:
    release = version("verl")
    makers = {"0.6": [make_old], "0.7": [make_old], "0.8": [make_gen_steps], "0.9": [make_steps, make_sampled]}
    for maker in makers[release.rsplit(".", 1)[0]]:
        name = f"verl-{release}" + ("-v1" if maker is make_sampled else "")
        shutil.rmtree(root / name, ignore_errors=True)
        maker(root / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
