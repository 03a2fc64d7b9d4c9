"""Creates a tiny model, its tokenizer and arithmetic data in seconds.

The model is a two-layer Qwen2 that is trained to answer an addition with a number near the sum; it is right one time in
four. So the base model knows the format of an answer and can estimate, and reinforcement learning teaches it to be
exact. Validation uses additions that are not in the training data. ``python -m recipes.cpu.assets FOLDER`` creates
everything that a training needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT_VERSION = 2
RECORD = "assets.json"
DATA_SOURCE = "addition"

MAX_SUM = 9
HELD_OUT = 11

# The base model answers with a number at most SPREAD away from the sum, then up to SPACES spaces.
SPREAD = 2
SPACES = 2
SPACE_PROBABILITY = 0.1

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Assets:
    """The paths of the model and the data."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def train_file(self) -> Path:
        return self.folder / "train.parquet"

    @property
    def val_file(self) -> Path:
        return self.folder / "val.parquet"


@dataclass(frozen=True)
class Recipe:
    """The parameters that assets are created from."""

    seed: int
    data_seed: int
    train_rows: int
    val_rows: int
    format_version: int = FORMAT_VERSION


def make_assets(
    folder: str | Path, seed: int = 0, *, data_seed: int | None = None, train_rows: int = 88, val_rows: int = 11
) -> Assets:
    """Create the assets in a folder unless it has them already. Assets with other parameters are replaced.

    ``seed`` determines the model and, unless ``data_seed`` is given, the data.
    """
    assets = Assets(Path(folder).resolve())
    recipe = Recipe(seed, seed if data_seed is None else data_seed, train_rows, val_rows)
    if _recorded(assets.folder) == asdict(recipe):
        return assets
    if assets.folder.exists() and any(assets.folder.iterdir()) and _recorded(assets.folder) is None:
        raise FileExistsError(f"{assets.folder} contains something else: use a new or an empty folder")
    building = Assets(assets.folder.parent / f".{assets.folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    building.folder.mkdir(parents=True)
    try:
        _write_data(building, recipe)
        _write_model(building, recipe)
        (building.folder / RECORD).write_text(json.dumps(asdict(recipe), indent=2) + "\n")
        shutil.rmtree(assets.folder, ignore_errors=True)
        try:
            building.folder.rename(assets.folder)
        except OSError:
            # another process may have created the same in the meantime
            if _recorded(assets.folder) != asdict(recipe):
                raise
    finally:
        shutil.rmtree(building.folder, ignore_errors=True)
    return assets


def _recorded(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return None


def problems() -> list[tuple[str, str]]:
    """All additions with a one-digit sum, and their answers."""
    return [(f"{a}+{b}=", str(a + b)) for a in range(MAX_SUM + 1) for b in range(MAX_SUM + 1 - a)]


def _write_data(assets: Assets, recipe: Recipe) -> None:
    import pandas

    rng = random.Random(recipe.data_seed)
    shuffled = rng.sample(problems(), len(problems()))
    for path, rows, part in (
        (assets.train_file, recipe.train_rows, shuffled[HELD_OUT:]),
        (assets.val_file, recipe.val_rows, shuffled[:HELD_OUT]),
    ):
        chosen = [part[index % len(part)] for index in range(rows)]
        pandas.DataFrame([_row(index, *problem) for index, problem in enumerate(chosen)]).to_parquet(path)


def _row(index: int, question: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def _write_model(assets: Assets, recipe: Recipe) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(assets.model)
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(recipe.seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                # 32 dimensions per head: the minimum that vLLM's attention supports on CPU
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=256,
                tie_word_embeddings=False,
                # much larger than usual: such a small model learns faster this way
                initializer_range=0.1,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
            )
        )
        _teach_estimates(model, tokenizer)
    with _no_progress_bars():
        model.save_pretrained(assets.model)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Makes the model independent of the number of cores; threads would not speed up such a small model anyway."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _tokenizer() -> Any:
    """One token per byte, plus ChatML's special tokens. Without merges, a text always has the same tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _teach_estimates(model: Any, tokenizer: Any, steps: int = 200) -> None:
    """Supervised steps on all problems at once. The target is a number near the sum, then spaces."""
    import torch
    from torch.nn.functional import cross_entropy

    prompts = torch.tensor([_prompt_ids(tokenizer, question) for question, _ in problems()])
    sums = [int(answer) for _, answer in problems()]
    digits = tokenizer.convert_tokens_to_ids([str(digit) for digit in range(MAX_SUM + 1)])
    space, end = tokenizer.encode(" ")[0], tokenizer.eos_token_id
    first = torch.zeros(len(sums), len(tokenizer))
    for row, number in enumerate(sums):
        near = [token for digit, token in enumerate(digits) if abs(digit - number) <= SPREAD]
        first[row, near] = 1 / len(near)
    later = torch.zeros(SPACES + 1, len(tokenizer))
    later[:SPACES, space], later[:SPACES, end] = SPACE_PROBABILITY, 1 - SPACE_PROBABILITY
    later[SPACES, end] = 1.0
    targets = torch.cat([first[:, None], later.expand(len(sums), -1, -1)], dim=1)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps, pct_start=0.2)
    spaces = torch.full((len(sums), SPACES), space)
    for _ in range(steps):
        answers = torch.tensor(digits)[torch.randint(len(digits), (len(sums), 1))]
        inputs = torch.cat([prompts, answers, spaces], dim=1)
        logits = model(inputs, logits_to_keep=targets.shape[1]).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _prompt_ids(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Create a tiny model and arithmetic data for a training on CPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="determines the model and the data")
    parser.add_argument("--train-rows", type=int, default=88)
    parser.add_argument("--val-rows", type=int, default=11)
    arguments = parser.parse_args()
    assets = make_assets(arguments.folder, arguments.seed, train_rows=arguments.train_rows, val_rows=arguments.val_rows)
    print(assets.folder)


if __name__ == "__main__":
    main()
