"""verl's single-turn agent loop, which also tells the server which sample of which data row it requests.

Without that, the n requests for one prompt look the same, and the order in which they arrive decides which of them gets
which response.
"""

from __future__ import annotations

import math
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipes.cpu.sampling import seed_of


class CPUAgentLoop(SingleTurnAgentLoop):
    """Single turn, with a seed per request."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        seed = seed_of(kwargs.get("index"), self._sample(int(priority), kwargs.get("session_id")))
        return await super().run({**sampling_params, "seed": seed}, priority=priority, **kwargs)

    def _sample(self, priority: int, session_id: int | None) -> int:
        """The number of this sample among those of its prompt.

        The V1 trainers pass it. V0 numbers the rows of the batch, where the samples of a prompt are adjacent. The least
        common multiple works for both training and validation, which the agent loop cannot tell apart.
        """
        if session_id is not None:
            return int(session_id)
        return priority % math.lcm(self.rollout_config.n, self.rollout_config.val_kwargs.n)
