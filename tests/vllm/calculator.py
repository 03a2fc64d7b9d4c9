"""A tool for verl's tool_agent, with the parser that finds its calls and the reward of the conversation.

The tiny model cannot write JSON, so an answer that is a bare number counts as a call: the calculator says how far off
it is, and the model may answer again. Any other answer ends the conversation.
"""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


@ToolParser.register("bare_number")
class BareNumberParser(ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        if not text.isdigit():
            return text, []
        return text, [FunctionCall(name="calculator", arguments=json.dumps({"answer": int(text)}))]


class Calculator(BaseTool):
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        conversation = kwargs["agent_data"]
        question = conversation.messages[0]["content"].removesuffix("=")
        error = parameters["answer"] - sum(map(int, question.split("+")))
        conversation.turn_scores.append(1.0 / (1 + abs(error)))
        return ToolResponse(text=f"{error:+d}"), self.config["reward"] * (error == 0), {}


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    """1 if the first answer is right, 0.5 if a later one is."""
    score = 1.0 if solution_str.startswith(ground_truth) else 0.5 * (ground_truth in solution_str)
    return {"score": score, "acc": float(score > 0)}
