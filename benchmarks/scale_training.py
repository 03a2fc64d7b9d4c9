"""One V1 training with large samples, run in its own process: record some steps, then replay them, and measure both.

``python -m benchmarks.scale_training '{"rows": 2048, "length": 2000, "units": 8, …}'`` prints its result as JSON on the
last line. verl's ``fit``, replay buffer and TransferQueue are real. Ray tasks put synthetic trajectories into
TransferQueue, as agent loops do, so that the driver never holds them unless this package brings them there.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from tests.trainers.v1.training import PARTITION, Trainings, WithoutWorkers
from verl_rollout_skip.trainers.v1.compat import connect_queue
from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin
from verl_rollout_skip.trainers.v1.transfer import pool

SAMPLES = 8
STEPS = 3
_ROWS_PER_TASK = 64


@dataclass(frozen=True)
class Scale:
    """One configuration. ``length`` is about the mean number of tokens of a trajectory, ``tasks`` the setting, and
    ``at_once`` the number of tasks that run at the same time."""

    rows: int
    length: int
    units: int = 8
    tasks: str = "on"
    part_bytes: int = 256 << 20
    at_once: int = 2

    @property
    def prompts(self) -> int:
        return self.rows // SAMPLES


def _generate(prompts: list[dict[str, Any]], length: int) -> int:
    """What agent loops do with some prompts: put trajectories into TransferQueue. Returns their size in memory."""
    connect_queue()
    size = 0
    for prompt in prompts:
        rng = np.random.default_rng(prompt["index"])
        given = torch.from_numpy(rng.integers(0, 150_000, int(rng.integers(60, 400))))
        rows, tags = [], []
        for session in range(SAMPLES):
            # Lengths as in long-form reasoning: log-normal, limited to four times the mean.
            tokens = int(np.clip(rng.lognormal(np.log(length * 0.8), 0.65), 16, 4 * length))
            text = np.minimum(rng.zipf(1.3, tokens), 150_000)
            response, mask = torch.from_numpy(text), torch.ones(tokens, dtype=torch.int64)
            scores = torch.zeros(tokens)
            scores[-1] = float(rng.integers(0, 2))
            ids = torch.cat([given, response])
            rows.append(
                {
                    **prompt,
                    "session_id": session,
                    "prompts": given,
                    "responses": response,
                    "response_mask": mask,
                    "loss_mask": mask,
                    "input_ids": ids,
                    "position_ids": torch.arange(len(ids)),
                    "rollout_log_probs": torch.from_numpy(-rng.exponential(0.35, tokens).astype(np.float32)),
                    "rm_scores": scores,
                    "num_turns": 2,
                    "metrics": {"generate_sequences": float(rng.random()), "tool_calls": 0.0},
                    "extra_fields": {"reward_extra_info": {"acc": float(scores[-1])}, "min_global_steps": 0},
                    "multi_modal_inputs": {},
                }
            )
            lengths = {"prompt_len": len(given), "response_len": tokens, "seq_len": len(ids)}
            steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 0)
            tags.append({"status": "success", **lengths, **steps})
            size += sum(value.nbytes for value in rows[-1].values() if isinstance(value, torch.Tensor))
        keys = [f"{prompt['uid']}_{session}_0" for session in range(SAMPLES)]
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=list_of_dict_to_tensordict(rows), tags=tags)
    uids = [prompt["uid"] for prompt in prompts]
    tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=[{"status": "finished"}] * len(uids))
    return size


class Engine:
    """Generates in Ray tasks. ``sizes`` are the bytes of the tensors of each step."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.sizes: list[int] = []
        self.version = 0

    def generate_sequences(self, batch: TensorDict) -> None:
        columns = {name: batch.get(name) for name in batch.keys()}  # noqa: SIM118
        lists = {name: column.tolist() for name, column in columns.items() if hasattr(column, "tolist")}
        prompts = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        generate = ray.remote(_generate).options(num_cpus=0, scheduling_strategy="SPREAD")
        count = _ROWS_PER_TASK // SAMPLES
        waiting = [prompts[start : start + count] for start in range(0, len(prompts), count)]
        running: list[Any] = []
        size = 0
        while waiting or running:
            while waiting and len(running) < 2:
                running.append(generate.remote(waiting.pop(0), self._length))
            done, running = ray.wait(running)
            size += sum(ray.get(done))
        self.sizes.append(size)


class Memory:
    """The largest private memory of this process, sampled on a thread."""

    def __init__(self) -> None:
        self.before = self.peak = _private_bytes()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The growth since the start."""
        self._stopped.set()
        self._thread.join()
        return self.peak - self.before

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            self.peak = max(self.peak, _private_bytes())


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


@dataclass
class Step:
    """What one rollout step cost: seconds on the training thread without generation, of which its CPU was busy ``cpu``
    seconds; seconds until nothing is left to do in the background; and the growth of the driver's memory."""

    blocked: float
    cpu: float
    total: float
    memory: int


class Trainer(RolloutSkipMixin, WithoutWorkers, PPOTrainerSync):
    """verl's synchronous trainer. Instead of updating, it waits until everything in the background is done."""

    keeps_sampled_rows = True

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        sample, self.measured = self._sample, []

        def generate(**arguments: Any) -> Any:
            result = sample(**arguments)
            gc.collect()
            self._memory = Memory()
            self._start()
            return result

        self._sample = generate
        return buffer

    def _rollout_step(self, *arguments: Any, **named: Any) -> Any:
        gc.collect()
        self._memory = Memory()
        self._start()
        result = super()._rollout_step(*arguments, **named)
        self._blocked, self._cpu = time.perf_counter() - self._started, time.thread_time() - self._cpu
        return result

    def _start(self) -> None:
        self._started, self._cpu = time.perf_counter(), time.thread_time()

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Takes as long as the work in the background, so that nothing waits for it."""
        while self._is_busy():
            time.sleep(0.02)
        total = time.perf_counter() - self._started
        self.measured.append(Step(self._blocked, self._cpu, total, self._memory.stop()))
        return batch

    def _is_busy(self) -> bool:
        """Whether a rollout is being read, written, or put ahead of time."""
        return any(
            thread.name.startswith(("rollout-skip-put", "rollout-skip-read")) for thread in threading.enumerate()
        ) or bool(self.rollout_skip._recorder and self.rollout_skip._recorder.store._writer._jobs)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch


def measure(scale: Scale, folder: Path) -> dict[str, Any]:
    """Record some steps and replay them."""
    trainings = Trainings(folder)
    prompts = [
        {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": f"Prove lemma {row}. " * 20}],
            "reward_model": {"style": "rule", "ground_truth": str(row)},
            "extra_info": {"index": row},
        }
        for row in range(scale.prompts)
    ]
    pandas.DataFrame(prompts).to_parquet(folder / "inputs" / "train.parquet")
    settings = [
        f"data.train_batch_size={scale.prompts}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"trainer.total_training_steps={STEPS}",
        f"+rollout_skip.tasks={scale.tasks}",
        f"+rollout_skip.part_bytes={scale.part_bytes}",
    ]
    found: dict[str, Any] = {**asdict(scale)}
    for mode in ("record", "replay"):
        trainer = trainings.train(mode, *settings, kind=Trainer, engine=Engine(scale.length))
        found[mode] = [asdict(step) for step in trainer.measured]
        if mode == "record":
            found["sample_bytes"] = max(trainer.engine.sizes)
            found["stored_bytes"] = sum(file.stat().st_size for file in folder.rglob("gen_*.parquet")) // STEPS
    return found


def main() -> None:
    scale = Scale(**json.loads(sys.argv[1]))
    pool._PER_NODE = scale.at_once
    with tempfile.TemporaryDirectory() as name:
        ray.init(num_cpus=scale.units + 8, num_gpus=0, include_dashboard=False, log_to_driver=False)
        try:
            units = {"backend": {"SimpleStorage": {"num_data_storage_units": scale.units}}}
            tq.init(OmegaConf.create(units))
            result = measure(scale, Path(name))
        finally:
            tq.close()
            ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
