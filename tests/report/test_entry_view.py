"""The JSON of one rollout step, checked against the recorded batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict
from verl import DataProto

from tests.arithmetic_run import conversation, encode, make_output, make_tokenizer, token_of_byte
from tests.batches import data_proto, objects, rollout_input, rollout_output
from tests.entry_files import part_file
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.report.entry_view import EntryView, EntryViews, messages
from verl_rollout_skip.report.sampling import Sampling
from verl_rollout_skip.report.tokens import PieceKind, TokenTexts
from verl_rollout_skip.store.reader import StoreReader

TOKENIZER = make_tokenizer()
KEY = RolloutKey(3, 1)


def view(
    folder: Path, batch: Any, inputs: Any = None, groups: int = 100, limit: int | None = None, **sampling: Any
) -> EntryView:
    """Record a batch and create its view."""
    RolloutStore(folder, background=False).put(KEY, batch, inputs=inputs, info={"generate_s": 12.5}, replace=True)
    return views(folder, limit, **sampling).view(KEY, groups)


def views(folder: Path, limit: int | None = None, **sampling: Any) -> EntryViews:
    return EntryViews(StoreReader.at(str(folder)), TokenTexts(TOKENIZER, "here"), Sampling(**sampling), limit)


def text_of(found: EntryView, text: dict[str, Any]) -> str:
    return "".join(found.json["vocabulary"][number][0] for number in text["pieces"])


def one_group(**changes: Any) -> tuple[DataProto, DataProto]:
    """Four answers to one question."""
    inputs, texts, scores = conversation(1, 1, seed=0)
    return inputs, encode(TOKENIZER, inputs, texts, scores)


def test_groups_have_the_prompt_the_scores_and_the_best_and_worst_response(tmp_path: Path) -> None:
    inputs, texts, scores = conversation(5, 3, seed=4)
    found = view(tmp_path, encode(TOKENIZER, inputs, texts, scores), inputs)
    assert found.broken is None
    assert (found.json["step"], found.json["gen_batch"], found.json["all_groups"]) == (3, 1, 3)
    assert len(found.json["groups"]) == 3
    for position, group in enumerate(found.json["groups"]):
        rows = range(4 * position, 4 * position + 4)
        assert sorted(row["row"] for row in group["rows"]) == list(rows)
        assert [row["score"] for row in group["rows"]] == sorted((round(scores[row], 6) for row in rows), reverse=True)
        question = inputs.non_tensor_batch["raw_prompt"][rows[0]][0]["content"]
        assert group["messages"] == [["user", question]]
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert text_of(found, group["prompt"]) == asked
        assert inputs.non_tensor_batch["reward_model"][rows[0]]["ground_truth"] in group["reference"]
        best, worst = group["responses"]
        assert scores[best["row"]] == max(scores[row] for row in rows)
        assert scores[worst["row"]] == min(scores[row] for row in rows)
        for response in (best, worst):
            assert text_of(found, response["text"]) == texts[response["row"]] + "<|im_end|>"
            assert response["extras"] == {"acc": float(scores[response["row"]] == 1.0)}


def test_statistics_cover_all_rows(tmp_path: Path) -> None:
    batch, inputs = rollout_output(64, seed=5), rollout_input(64, seed=5)
    found = view(tmp_path, batch, inputs, groups=1)
    numbers = found.json["statistics"]
    scores = batch.batch["rm_scores"].sum(-1).double().numpy()
    lengths = batch.batch["response_mask"].sum(-1).numpy()
    assert len(found.json["groups"]) == 1
    assert numbers["rows"] == 64
    assert numbers["score"] == pytest.approx(scores.mean(), rel=1e-5)
    assert numbers["score_std"] == pytest.approx(scores.std(), rel=1e-5)
    assert numbers["pass_rate"] == pytest.approx(scores.mean())
    assert numbers["length_p50"] == np.percentile(lengths, 50)
    assert numbers["length_p90"] == np.percentile(lengths, 90)
    assert numbers["length_max"] == lengths.max()
    assert numbers["at_limit"] == pytest.approx((lengths == 10).mean())
    equal = [len(set(scores[row : row + 2])) == 1 for row in range(0, 64, 2)]
    assert numbers["zero_variance"] == pytest.approx(np.mean(equal))
    assert numbers["generate_s"] == 12.5
    assert (found.counted.rows, found.counted.groups, found.counted.shown_groups) == (64, 32, 1)


def test_log_probs_of_several_tokens_in_one_piece_are_summed(tmp_path: Path) -> None:
    inputs, _ = one_group()
    ids = [*TOKENIZER.encode("So").ids, *(token_of_byte(TOKENIZER, byte) for byte in "🙃".encode()), 1]
    batch = make_output(TOKENIZER, inputs, [ids] * 4, [1.0, 0.0, 0.5, 0.2])
    found = view(tmp_path, batch, inputs)
    best = found.json["groups"][0]["responses"][0]
    log_probs = batch.batch["rollout_log_probs"][best["row"], : len(ids)].double().numpy()
    kinds = [found.json["vocabulary"][number] for number in best["text"]["pieces"]]
    sums, position = [], 0
    for _, _, tokens in kinds:
        sums.append(log_probs[position : position + len(tokens)].sum())
        position += len(tokens)
    assert position == len(ids)
    assert len(sums) < len(ids)
    assert best["text"]["log_probs"] == [round(-100 * value) for value in sums]
    assert best["mean_log_prob"] == pytest.approx(log_probs.mean(), rel=1e-4)


def test_a_long_response_shows_both_ends_with_their_log_probs(tmp_path: Path) -> None:
    inputs, _ = one_group()
    ids = [token_of_byte(TOKENIZER, byte) for byte in (b"0123456789" * 9)]
    batch = make_output(TOKENIZER, inputs, [ids] * 4, [1.0, 0.0, 0.5, 0.2])
    found = view(tmp_path, batch, inputs, tokens=20)
    text = found.json["groups"][0]["responses"][0]["text"]
    assert (text["length"], text["cut"], text["cut_at"]) == (90, 70, 15)
    assert text_of(found, text) == "012345678901234" + "56789"
    log_probs = batch.batch["rollout_log_probs"][found.json["groups"][0]["responses"][0]["row"], :90].double().numpy()
    shown = np.concatenate([log_probs[:15], log_probs[-5:]])
    assert text["log_probs"] == [round(-100 * value) for value in shown]
    assert found.counted.cut_texts == 2 + (found.json["groups"][0]["prompt"]["cut"] > 0)


def test_tokens_that_the_model_did_not_generate_are_marked(tmp_path: Path) -> None:
    inputs, batch = one_group()
    mask = batch.batch["response_mask"].clone()
    mask[:, 3:6] = 0
    batch.batch["response_mask"] = mask
    found = view(tmp_path, batch, inputs)
    text = found.json["groups"][0]["responses"][0]["text"]
    positions = np.flatnonzero(text["not_generated"]).tolist()
    tokens = np.cumsum([0, *(len(found.json["vocabulary"][number][2]) for number in text["pieces"])])
    assert [int(tokens[position]) for position in positions] == [3, 4, 5]


def test_jagged_batches_are_read_like_padded_ones(tmp_path: Path) -> None:
    def jagged(rows: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)

    asked = [TOKENIZER.encode("What is 7?").ids] * 2
    responses = [TOKENIZER.encode("So 7.").ids, TOKENIZER.encode("I am not sure").ids]
    batch = TensorDict(
        {
            "prompts": jagged(asked, torch.int64),
            "responses": jagged(responses, torch.int64),
            "rollout_log_probs": jagged([[-0.5] * len(row) for row in responses], torch.float32),
            "rm_scores": jagged(
                [[0.0] * (len(row) - 1) + [float(position)] for position, row in enumerate(responses)], torch.float32
            ),
        },
        batch_size=[2],
    )
    found = view(tmp_path, batch)
    [group] = found.json["groups"]
    assert text_of(found, group["prompt"]) == "What is 7?"
    assert [text_of(found, response["text"]) for response in group["responses"]] == ["I am not sure", "So 7."]
    assert set(group["responses"][0]["text"]["log_probs"]) == {50}
    assert found.json["statistics"]["limit"] is None


def test_padding_in_columns_that_were_stored_whole_is_removed(tmp_path: Path) -> None:
    inputs, batch = one_group()
    noise = torch.rand_like(batch.batch["rollout_log_probs"])
    mask = batch.batch["response_mask"].bool()
    batch.batch["rollout_log_probs"] = torch.where(mask, batch.batch["rollout_log_probs"], -noise)
    batch.batch["responses"] = torch.where(mask, batch.batch["responses"], torch.arange(mask.shape[1]) % 300)
    batch.batch["prompts"][:, 0] = 5
    found = view(tmp_path, batch, inputs)
    for response in found.json["groups"][0]["responses"]:
        length = int(mask[response["row"]].sum())
        assert response["text"]["length"] == length
        expected = batch.batch["rollout_log_probs"][response["row"], :length].double().mean()
        assert response["mean_log_prob"] == pytest.approx(float(expected), rel=1e-4)
    assert text_of(found, found.json["groups"][0]["prompt"]).startswith("<|im_start|>user")


def test_entries_without_input_log_probs_or_scores_are_shown(tmp_path: Path) -> None:
    _, batch = one_group()
    for name in ("rollout_log_probs", "rm_scores", "response_mask"):
        del batch.batch[name]
    batch.non_tensor_batch = {}
    found = view(tmp_path, batch)
    [group] = found.json["groups"]
    assert group["messages"] is group["reference"] is None
    assert [row["score"] for row in group["rows"]] == [None] * 4
    lengths = [row["length"] for row in group["rows"]]
    assert lengths == sorted(lengths)
    assert "log_probs" not in group["responses"][0]["text"]
    assert found.json["statistics"]["score"] is None
    assert found.json["statistics"]["pass_rate"] is None


def test_without_prompts_each_row_is_its_own_group(tmp_path: Path) -> None:
    found = view(tmp_path, data_proto({"something": torch.rand(3, 2)}))
    assert found.broken is None
    assert [group["responses"][0]["text"] for group in found.json["groups"]] == [None] * 3
    assert found.json["statistics"]["length"] is None


def test_nan_and_infinite_scores_become_strings(tmp_path: Path) -> None:
    inputs, batch = one_group()
    batch.batch["rm_scores"].zero_()
    batch.batch["rm_scores"][:, 0] = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    batch.batch["rollout_log_probs"][2, 0] = float("nan")
    batch.batch["rollout_log_probs"][2, 1] = -float("inf")
    found = view(tmp_path, batch, inputs, responses=4)
    assert [row["score"] for row in found.json["groups"][0]["rows"]] == ["inf", 1.0, "-inf", "nan"]
    first = found.json["groups"][0]["responses"][0]
    assert first["row"] == 2
    assert first["text"]["log_probs"][0] is None
    assert first["text"]["log_probs"][1] == 9999


def test_empty_responses_are_shown_as_such(tmp_path: Path) -> None:
    inputs, _ = one_group()
    found = view(tmp_path, make_output(TOKENIZER, inputs, [[], [1], [], []], [0.0, 1.0, 0.0, 0.0]), inputs)
    worst = found.json["groups"][0]["responses"][1]
    assert worst["text"]["pieces"] == worst["text"]["log_probs"] == []
    assert worst["mean_log_prob"] is None


def test_a_step_without_rows_has_no_groups_and_no_statistics(tmp_path: Path) -> None:
    found = view(tmp_path, rollout_output(0), rollout_input(0))
    assert found.broken is None
    assert (found.json["groups"], found.json["all_groups"]) == ([], 0)
    assert found.json["statistics"]["score"] is found.json["statistics"]["length_p50"] is None


def test_invalid_bytes_are_pieces_of_kind_bytes(tmp_path: Path) -> None:
    inputs, _ = one_group()
    ids = [token_of_byte(TOKENIZER, 0xFF)]
    found = view(tmp_path, make_output(TOKENIZER, inputs, [ids] * 4, [0.0] * 4), inputs)
    [number] = found.json["groups"][0]["responses"][0]["text"]["pieces"]
    assert found.json["vocabulary"][number][:2] == ["\\xff", int(PieceKind.BYTES)]


def test_the_configured_limit_takes_precedence_over_the_padded_width(tmp_path: Path) -> None:
    inputs, batch = one_group()
    found = view(tmp_path, batch, inputs, limit=5)
    assert found.json["statistics"]["limit"] == 5
    assert all(row["at_limit"] for row in found.json["groups"][0]["rows"])


def test_a_damaged_entry_is_a_broken_view(tmp_path: Path) -> None:
    inputs, batch = one_group()
    view(tmp_path, batch, inputs)
    file = part_file(tmp_path, 3, 1)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    found = views(tmp_path).view(KEY, 4)
    assert found.broken is not None
    assert "step 3, generation batch 1 is damaged" in found.broken
    assert found.json == {"step": 3, "gen_batch": 1, "broken": found.broken, "groups": []}


def test_more_groups_follow_the_sample_and_a_whole_group_has_all_responses(tmp_path: Path) -> None:
    inputs, texts, scores = conversation(5, 12, seed=4)
    batch = encode(TOKENIZER, inputs, texts, scores)
    sample = view(tmp_path, batch, inputs, groups=4)
    shown = {group["number"] for group in sample.json["groups"]}
    more = views(tmp_path).more_groups(KEY, 4, 6)
    after = {group["number"] for group in more["groups"]}
    rest = {group["number"] for group in views(tmp_path).more_groups(KEY, 10, 6)["groups"]}
    assert (len(shown), len(after), len(rest)) == (4, 6, 2)
    assert shown | after | rest == set(range(12))
    [whole] = views(tmp_path).whole_group(KEY, 7)["groups"]
    assert sorted(response["row"] for response in whole["responses"]) == [28, 29, 30, 31]
    assert views(tmp_path).whole_group(KEY, 99)["groups"] == []


def test_cells_of_all_kinds_become_readable_json(tmp_path: Path) -> None:
    inputs, batch = one_group()
    strange = {
        "tuple": (1, "a"),
        "big": 2**80,
        "nan": float("nan"),
        "numpy": np.float32(0.5),
        "text": np.str_("x"),
        "array": np.arange(3),
        "objects": objects([{"b": 1}]),
        "bytes": b"\0",
        "tensor": torch.zeros(3, 4),
        "picture": Image.new("RGB", (640, 480)),
        "surrogate": "\ud800",
        5: "number",
    }
    inputs.non_tensor_batch["reward_model"] = objects([strange] * 4)
    inputs.non_tensor_batch["raw_prompt"] = objects([objects([{"role": "user", "content": "hi"}])] * 4)
    found = view(tmp_path, batch, inputs)
    [group] = found.json["groups"]
    assert group["messages"] == [["user", "hi"]]
    for word in ('"a"', str(2**80), "nan", "0.5", "[0, 1, 2]", '{"b": 1}', "x00", "number"):
        assert word in group["reference"], word
    assert "(tensor float32 [3, 4])" in group["reference"]
    assert "(image RGB [640, 480])" in group["reference"]


def test_messages_with_content_parts_and_unexpected_values(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image"}]
    assert messages([{"role": "user", "content": parts}]) == [["user", "look\n(image)"]]
    assert messages("just text") is messages([]) is messages(["x"]) is None
