"""verl's single-turn agent loop, which also tells the server which sample of which row of the data it asks for.

Without that, the n requests for one prompt look the same, and which of them gets which response depends on the order
in which they arrive.
"""

from __future__ import annotations

import math
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipes.cpu.sampling import seed_of


class CPUAgentLoop(SingleTurnAgentLoop):
    """Single turn, with a seed for each request."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        seed = seed_of(kwargs.get("index"), self._sample(int(priority), kwargs.get("session_id")))
        return await super().run({**sampling_params, "seed": seed}, priority=priority, **kwargs)

    def _sample(self, priority: int, session_id: int | None) -> int:
        """Which of the samples of one prompt this is.

        The V1 trainers say so. V0 numbers the rows of the batch, in which the samples of a prompt stand next to each
        other; the least common multiple serves training and validation, which the agent loop cannot tell apart.
        """
        if session_id is not None:
            return int(session_id)
        return priority % math.lcm(self.rollout_config.n, self.rollout_config.val_kwargs.n)
