"""Stand-ins for the workers of a driver-level training, which need GPUs: the actor, the engine, the critic.

Each one is simple, but its output depends on everything that it should depend on. The actor's weights are the number of
its updates; the engine's responses depend on the prompts, the sampling settings and the weights that it got last. So a
forgotten weight sync or another prompt changes all later numbers. The outputs have the shapes of verl's own.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from verl import DataProto
from verl.experimental.agent_loop import agent_loop

VERL = tuple(int(part) for part in re.findall(r"\d+", verl.__version__)[:3])
SYNCS_BY_ITSELF = VERL < (0, 7)
"""verl 0.6.1 sends the weights as part of each generation, later ones by a checkpoint manager."""

Score = Callable[[str, str], dict[str, float]]


@dataclass
class Workers:
    """The stand-ins of one training. ``events`` lists the calls that they received, in order."""

    tokenizer: Any
    config: Any
    score: Score
    events: list[str] = field(default_factory=list)
    trained: list[DataProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.actor = Actor(self)
        self.critic = Critic()
        self.engine = Engine(self)
        self.checkpoint_manager = CheckpointManager(self)
        self.reward_model = RewardModel(self)


class Actor:
    """The worker group of the actor and the reference policy: ``actor_rollout_wg``."""

    world_size = 1

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._dispatch_info = {"actor": [0]}
        self.workers = [object()]
        self.updates = 0

    def init_model(self) -> None:
        pass

    def compute_log_prob(self, data: Any) -> Any:
        log_probs, entropy = (_of_tokens(data, seed) for seed in (self.updates, 1000))
        return _output(data, {"old_log_probs": log_probs, "entropys": entropy}, {"mfu": 0.5})

    def compute_ref_log_prob(self, data: Any) -> Any:
        return _output(data, {"ref_log_prob": _of_tokens(data, 2000)}, {})

    def update_actor(self, data: Any) -> Any:
        if VERL < (0, 7):
            self._workers.trained.append(copy.deepcopy(data))
        self._workers.events.append("update")
        self.updates += 1
        return _metrics(data, {"pg_loss": [self.updates / 7], "grad_norm": [0.25], "mfu": [0.5]}, "actor")

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The rollout of verl 0.6.1 in sync mode."""
        return self._workers.engine.generate_in_worker(prompts)

    def save_checkpoint(self, path: str, *args: Any, **kwargs: Any) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "updates").write_text(str(self.updates))

    def load_checkpoint(self, path: str | None, *args: Any, **kwargs: Any) -> None:
        if path is not None:
            self.updates = int((Path(path) / "updates").read_text())


class Critic:
    """The worker group of the critic: ``critic_wg``."""

    def compute_values(self, data: Any) -> Any:
        return _output(data, {"values": _of_tokens(data, 3000)}, {})

    def update_critic(self, data: Any) -> Any:
        return _metrics(data, {"vf_loss": [0.125], "mfu": [0.5]}, "critic")

    def infer_batch(self, data: Any) -> Any:
        return _Future(self.compute_values(data))

    def train_mini_batch(self, data: Any) -> Any:
        return _Future(self.update_critic(data))

    def save_checkpoint(self, path: str, *args: Any, **kwargs: Any) -> None:
        Path(path).mkdir(parents=True)

    def load_checkpoint(self, path: str, *args: Any, **kwargs: Any) -> None:
        assert Path(path).is_dir()


class CheckpointManager:
    """Sends the actor's weights to the engine, which wakes it up, and puts it to sleep."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        self._workers.events.append(f"sync {global_steps}")
        self._workers.engine.take_weights()
        self._workers.engine.awake = True
        return {}

    def sleep_replicas(self) -> None:
        self._workers.events.append("sleep")
        self._workers.engine.awake = False


class RewardModel:
    """A reward model that shares the actor's devices, behind ``reward_loop_manager``."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def compute_rm_score(self, data: DataProto) -> DataProto:
        assert not self._workers.engine.awake, "the engine occupies the devices that the reward model needs"
        self._workers.events.append("reward")
        width = data.batch["prompts"].shape[1]
        scores = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extras: dict[str, list[float]] = {}
        for row, answer in enumerate(data.non_tensor_batch["reward_model"]):
            length = int(data.batch["attention_mask"][row, width:].sum())
            response = self._workers.tokenizer.decode(data.batch["responses"][row, :length], skip_special_tokens=True)
            result = self._workers.score(response, answer["ground_truth"])
            scores[row, length - 1] = result["score"]
            for key, value in result.items():
                extras.setdefault(key, []).append(value)
        scored = DataProto.from_dict({"rm_scores": scores})
        scored.non_tensor_batch = {key: np.array(values) for key, values in extras.items()}
        scored.meta_info = {"reward_extra_keys": list(extras)}
        return scored


@dataclass(frozen=True)
class Call:
    """One request for rollouts."""

    rows: int
    validate: bool
    weights: int
    columns: frozenset[str]
    meta: dict[str, Any]


class Engine:
    """The inference engine and its agent loops: ``async_rollout_manager``."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._rollout = workers.config.actor_rollout_ref.rollout
        self.weights = -1
        self.awake = False
        self.echoes = False
        self.calls: list[Call] = []

    @property
    def training_calls(self) -> list[Call]:
        return [call for call in self.calls if not call.validate]

    def take_weights(self) -> None:
        self.weights = self._workers.actor.updates

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self._note(prompts)
        rows = [
            self._trajectory(self._prompt_ids(prompts.non_tensor_batch["raw_prompt"][row]), *asked)
            for row, asked in enumerate(self._asked(prompts))
        ]
        worker = _agent_loop_worker(echoes=self.echoes)
        arguments = [] if VERL < (0, 7) else [prompts.non_tensor_batch]
        output = worker._postprocess(rows, *arguments)
        metrics = output.meta_info.pop("metrics")
        timing = agent_loop.AgentLoopManager._performance_metrics(None, [metrics], output)
        output.meta_info = {"timing": timing, **output.meta_info}
        if VERL >= (0, 9):
            prompts.non_tensor_batch["priority"] = np.arange(len(prompts))  # verl leaves it in its input
        return output

    def generate_in_worker(self, prompts: DataProto) -> DataProto:
        """What vLLMRollout of verl 0.6.1 returns: no rewards, and the columns of the input except the tokens."""
        self._note(prompts)
        tensors: dict[str, list[torch.Tensor]] = {}
        for row, asked in enumerate(self._asked(prompts)):
            tokens = prompts.batch["input_ids"][row][prompts.batch["attention_mask"][row].bool()]
            trajectory = self._trajectory(tokens.tolist(), *asked)
            for key, name in (("prompts", "prompt_ids"), ("responses", "response_ids"), *((n, n) for n in _SEQUENCE)):
                tensors.setdefault(key, []).append(getattr(trajectory, name))
            tensors.setdefault("rollout_log_probs", []).append(trajectory.response_logprobs)
        output = DataProto.from_dict({key: torch.cat(values) for key, values in tensors.items()})
        columns = {key: value for key, value in prompts.non_tensor_batch.items() if key != "raw_prompt_ids"}
        output.non_tensor_batch = columns
        output.meta_info = {"timing": {"generate_sequences": 1.0, "generation_timing/max": 1.0}}
        return output

    def _note(self, prompts: DataProto) -> None:
        validate = bool(prompts.meta_info.get("validate", False))
        if SYNCS_BY_ITSELF:
            self.take_weights()
        columns = frozenset(prompts.non_tensor_batch)
        self.calls.append(Call(len(prompts), validate, self.weights, columns, dict(prompts.meta_info)))
        state = "" if self.awake or SYNCS_BY_ITSELF else " asleep"
        self._workers.events.append(("validate" if validate else "generate") + state)

    def _asked(self, prompts: DataProto) -> list[tuple[int, bool, str | None]]:
        """For each row: the index among the samples of its prompt, whether it is sampled, and the answer if known."""
        sampled = prompts.non_tensor_batch.get("__do_sample__")
        greedy = not prompts.meta_info.get("do_sample", True)
        answers = prompts.non_tensor_batch.get("reward_model")
        samples: dict[Any, int] = {}
        asked = []
        for row, index in enumerate(prompts.non_tensor_batch["index"].tolist()):
            is_greedy = greedy or (sampled is not None and not sampled[row])
            sample = samples[index, is_greedy] = samples.get((index, is_greedy), -1) + 1
            asked.append((sample, is_greedy, None if answers is None else answers[row]["ground_truth"]))
        return asked

    def _prompt_ids(self, messages: Any) -> list[int]:
        text = self._workers.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return self._workers.tokenizer.encode(text, add_special_tokens=False)

    def _trajectory(self, prompt: list[int], sample: int, greedy: bool, answer: str | None) -> Any:
        seed = f"{prompt} {'greedy' if greedy else sample} {self.weights} {self._rollout.temperature}"
        number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
        # About every other response is right, and every fourth ends with its first token.
        text = str(number % 10) if number % 2 or answer is None else answer
        text += " " * (number // 10 % 4)
        response = [*self._workers.tokenizer.encode(text), self._workers.tokenizer.eos_token_id]
        result = {} if answer is None or self.echoes else self._workers.score(text, answer)
        return _padded(prompt, response, self._rollout, self._workers.tokenizer.pad_token_id, number, result)


_SEQUENCE = ("input_ids", "attention_mask", "position_ids")


def _padded(
    prompt: list[int], response: list[int], rollout: Any, pad: int, number: int, result: dict[str, float]
) -> Any:
    """One trajectory, in the form that verl's agent-loop workers combine into a batch."""
    before, after = rollout.prompt_length - len(prompt), rollout.response_length - len(response)
    assert before >= 0, "a prompt is longer than data.max_prompt_length"
    assert after >= 0, "a response is longer than data.max_response_length"
    mask = torch.tensor([[0] * before + [1] * (len(prompt) + len(response)) + [0] * after])
    log_probs = [-((number + place) % 13) / 17 for place in range(len(response))]
    prompt_ids = torch.tensor([[pad] * before + prompt])
    response_ids = torch.tensor([response + [pad] * after])
    extras: dict[str, Any] = {}
    if VERL >= (0, 7):
        extras = {"turn_scores": [], "tool_rewards": [], "min_global_steps": None, "max_global_steps": None}
    if len(result) > 1:
        extras["reward_extra_info"] = dict(result)
    # verl builds these from values that are already checked.
    return agent_loop._InternalAgentLoopOutput.model_construct(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=torch.tensor([[1] * len(response) + [0] * after]),
        input_ids=torch.cat([prompt_ids, response_ids], dim=1),
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clip(min=0),
        response_logprobs=torch.tensor([log_probs + [0.0] * after], dtype=torch.float32),
        multi_modal_inputs={} if VERL >= (0, 7) else None,
        reward_score=result.get("score"),
        num_turns=2,
        metrics=agent_loop.AgentLoopMetrics(generate_sequences=1.0 + number % 5),
        extra_fields=extras,
    )


def _agent_loop_worker(echoes: bool) -> Any:
    """The part of verl's worker that combines trajectories into a batch. Without a reward loop it echoes its input."""
    kind = getattr(agent_loop, "AgentLoopWorkerBase", None) or agent_loop.AgentLoopWorker
    worker = object.__new__(kind)
    worker.reward_loop_worker_handles = None if echoes else []
    worker.data_proto_cls = DataProto  # asked for in verl's branch neo
    return worker


def _of_tokens(data: Any, seed: int) -> torch.Tensor:
    """A number for each token, depending on the token and on ``seed``."""
    tokens = data.batch["responses"] if isinstance(data, DataProto) else data["input_ids"].values()
    return -((tokens + 31 * seed) % 97 + 1).to(torch.float32) / 64


_NEW_NAMES = {"old_log_probs": "log_probs", "ref_log_prob": "log_probs", "entropys": "entropy", "values": "values"}


def _output(data: Any, tensors: dict[str, torch.Tensor], metrics: dict[str, float]) -> Any:
    """What a worker group returns: a DataProto, or from verl 0.8.0 on a TensorDict without padding."""
    if isinstance(data, DataProto):
        return DataProto.from_dict(tensors)
    from verl.utils import tensordict_utils

    offsets = data["input_ids"].offsets()
    nested = {
        _NEW_NAMES[key]: torch.nested.nested_tensor_from_jagged(value, offsets=offsets)
        for key, value in tensors.items()
    }
    return tensordict_utils.get_tensordict(nested, non_tensor_dict={"metrics": metrics})


def _metrics(data: Any, metrics: dict[str, list[float]], role: str) -> Any:
    if isinstance(data, DataProto):
        return DataProto(meta_info={"metrics": {f"{role}/{key}": value for key, value in metrics.items()}})
    from verl.utils import tensordict_utils

    return tensordict_utils.get_tensordict({}, non_tensor_dict={"metrics": metrics})


@dataclass(frozen=True)
class _Future:
    result: Any

    def get(self) -> Any:
        return self.result
