"""The tiny model and data of recipes/cpu: created once, reproducible, and able to learn."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.cpu.assets import Assets, make_assets, problems
from recipes.cpu.reward import compute_score


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("assets") / "tiny")


def digests(assets: Assets) -> dict[str, str]:
    files = (file for file in assets.folder.rglob("*") if file.is_file())
    return {str(file.relative_to(assets.folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def questions(file: Path) -> list[str]:
    return [messages[0]["content"] for messages in pandas.read_parquet(file)["prompt"]]


def test_existing_assets_are_kept(assets: Assets) -> None:
    before = {file: file.stat().st_mtime_ns for file in assets.folder.rglob("*")}
    assert make_assets(assets.folder) == assets
    assert {file: file.stat().st_mtime_ns for file in assets.folder.rglob("*")} == before


def test_assets_are_reproducible_and_replaced_when_their_parameters_change(assets: Assets, tmp_path: Path) -> None:
    first = digests(assets)
    assert {"model/model.safetensors", "model/tokenizer.json", "train.parquet", "val.parquet"} < first.keys()

    def different(made: Assets) -> set[str]:
        now = digests(made)
        return {name for name in {*first, *now} if first.get(name) != now.get(name)}

    folder = tmp_path / "new" / "folder"
    other_data = make_assets(folder, data_seed=7, train_rows=20)
    assert different(other_data) == {"assets.json", "train.parquet", "val.parquet"}
    assert len(questions(other_data.train_file)) == 20

    assert different(make_assets(folder, seed=1, data_seed=0)) == {"assets.json", "model/model.safetensors"}
    assert list(folder.parent.iterdir()) == [folder], "something was left behind"


def test_a_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(FileExistsError, match="contains something else: use a new or an empty folder"):
        make_assets(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_validation_prompts_are_not_in_the_training_data(assets: Assets) -> None:
    train, val = questions(assets.train_file), questions(assets.val_file)
    assert not set(train) & set(val)
    assert set(train) | set(val) == {question for question, _ in problems()}


def test_the_data_has_the_columns_that_verl_expects(assets: Assets) -> None:
    row = pandas.read_parquet(assets.train_file).to_dict("records")[3]
    question = row["prompt"][0]["content"]
    assert row["data_source"] == "addition"
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(eval(question.removesuffix("=")))}
    assert row["extra_info"] == {"index": 3}


def test_tokenization_does_not_depend_on_where_the_text_is_split(assets: Assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    text = "<|im_start|>user\n3+4=<|im_end|>\nÄ€ 𝄞"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [token for letter in ("<|im_start|>", *"user\n3+4=") for token in tokenizer.encode(letter)] == ids[:10]
    assert len(tokenizer.encode("\n")) == len(tokenizer.encode("<|im_end|>")) == 1
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4="}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"


def test_the_base_model_answers_near_the_sum_and_is_rarely_right(assets: Assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    model = AutoModelForCausalLM.from_pretrained(assets.model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question, _ in problems()
    ]
    with torch.no_grad():
        probabilities = model(torch.tensor(prompts)).logits[:, -1].softmax(-1)
    sums = torch.tensor([int(answer) for _, answer in problems()])
    digits = probabilities[:, tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)])]
    right = digits.gather(1, sums[:, None])
    near = (digits * ((torch.arange(10) - sums[:, None]).abs() <= 2)).sum(1)
    assert digits.sum(1).min() > 0.95
    assert near.min() > 0.8
    assert 0.15 < right.mean() < 0.35


@pytest.mark.parametrize(
    ("answer", "score"), [("7", 1.0), (" 7\n", 1.0), ("7  ", 1.0), ("77", 0.0), ("8", 0.0), ("", 0.0), ("=7", 0.0)]
)
def test_only_the_right_number_is_rewarded(answer: str, score: float) -> None:
    assert compute_score("addition", answer, "7", extra_info={"index": 0}) == {"score": score, "acc": score}


def test_the_assets_record_their_parameters(assets: Assets) -> None:
    record = json.loads((assets.folder / "assets.json").read_text())
    assert record == {"seed": 0, "data_seed": 0, "train_rows": 88, "val_rows": 11, "format_version": 2}
