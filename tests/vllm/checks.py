"""Assertions about trainings with vLLM."""

from __future__ import annotations

from tests.e2e.training import Finished

ENGINE = {"vLLMHttpServer", "EngineCore"}


def assert_engine_ran(training: Finished) -> None:
    """Shows that these are the right names, so that ``assert_no_engine`` means something."""
    assert training.actors >= ENGINE, training.actors


def assert_no_engine(training: Finished) -> None:
    assert "WorkerDict" in training.actors
    assert not {name for name in training.actors if "vllm" in name.lower()} | (ENGINE & training.actors)
    assert not {name for name in training.actors if name.startswith("AgentLoopWorker")}
    assert training.trace("sync") == []


def assert_weights_arrived(training: Finished, steps: int) -> None:
    """vLLM and the actor agree on the probability of every token, which requires the same weights."""
    differences = {
        step: values["training/rollout_probs_diff_max"] for step, values in training.metrics().items() if step
    }
    assert sorted(differences) == list(range(1, steps + 1))
    assert max(differences.values()) < 1e-5, differences
