"""A synthetic recording with readable text: a model learns arithmetic and answers with a byte-level tokenizer.

Scores and response lengths increase. The tests of the report and its screenshots use it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from verl import DataProto

from tests.batches import objects
from tests.trainings import Training
from verl_rollout_skip.key import RolloutKey

SAMPLES = 4
PROMPT_WIDTH = 64
RESPONSE_WIDTH = 160
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SENTENCES = (
    "Let me think step by step.",
    "First I add the tens, then the units.",
    "The tens of {a} and {b} give {tens}.",
    "The units give {units}.",
    "Wait, let me check that again.",
    "So {a} + {b} = {sum}.",
    "I am not sure, maybe it is {wrong}.",
    "Check: {sum} - {b} = {a}. ✓",
    "Ça fait {sum}, n'est-ce pas?",
)


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with some merges, so that tokens are words and parts of words or characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        sentence.format(a=a, b=7, tens=a, units=3, sum=a + 7, wrong=9) for a in range(99) for sentence in _SENTENCES
    ]
    questions = [
        f"What is {a} + {b}? Put the answer in a box.\n\\boxed{{{a}}} user assistant" for a in range(50) for b in (3, 8)
    ]
    tokenizer.train_from_iterator([*texts, *questions], trainer)
    return tokenizer


def token_of_byte(tokenizer: Tokenizer, byte: int) -> int:
    """The token of a single byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in plain]
    letter = chr(byte) if byte in plain else chr(0x100 + others.index(byte))
    return int(tokenizer.token_to_id(letter))


def make_training(folder: Path) -> tuple[Training, Tokenizer]:
    """A training whose model folder contains the tokenizer, which is copied into the recording."""
    training, tokenizer = Training(folder), make_tokenizer()
    tokenizer.save(str(folder / "inputs" / "model" / "tokenizer.json"))
    return training, tokenizer


def record(training: Training, tokenizer: Tokenizer, steps: range, prompts: int = 8, gen_batches: int = 1) -> Path:
    """Record these steps and return the variant folder."""
    with training.open("cache", actor_rollout_ref__rollout__n=SAMPLES) as skip:
        for step in steps:
            for gen_batch in range(gen_batches):
                inputs, texts, scores = conversation(step, prompts, seed=step * 100 + gen_batch)
                output = encode(tokenizer, inputs, texts, scores, seed=step)
                skip.step(RolloutKey(step, gen_batch), inputs, lambda _, output=output: output)
    (run,) = training.dumps.iterdir()
    (variant,) = run.iterdir()
    return variant


def conversation(step: int, prompts: int, seed: int) -> tuple[DataProto, list[str], list[float]]:
    """Questions, repeated for their samples, with answers and scores."""
    rng = np.random.default_rng(seed)
    skill = 1 - 0.85 * np.exp(-step / 12)
    columns: dict[str, list[Any]] = {name: [] for name in ("raw_prompt", "reward_model", "data_source", "uid")}
    texts, scores = [], []
    for number in range(prompts):
        a, b = (int(value) for value in rng.integers(10, 99, 2))
        question = f"What is {a} + {b}? Put the answer in a box."
        easy = rng.random() < 0.15 + 0.3 * skill
        for _ in range(SAMPLES):
            right = easy or rng.random() < skill * 0.8
            texts.append(answer(rng, a, b, bool(right), step))
            scores.append(1.0 if right else float(rng.choice([0.0, 0.0, 0.1])))
            columns["raw_prompt"].append([{"role": "user", "content": question}])
            columns["reward_model"].append({"style": "rule", "ground_truth": str(a + b)})
            columns["data_source"].append("addition" if number % 3 else "addition-hard")
            columns["uid"].append(f"{step}-{number}")
    arrays = {name: objects(values) for name, values in columns.items()}
    return DataProto(batch=None, non_tensor_batch=arrays, meta_info={"global_steps": step}), texts, scores


def answer(rng: np.random.Generator, a: int, b: int, right: bool, step: int) -> str:
    """A chain of thought that gets longer from step to step."""
    tens, units = (a // 10 + b // 10) * 10, a % 10 + b % 10
    words = {"a": a, "b": b, "tens": tens, "units": units, "sum": a + b, "wrong": a + b + int(rng.integers(1, 11))}
    count = int(rng.integers(1, 4 + step // 8))
    sentences = [_SENTENCES[position].format(**words) for position in rng.integers(0, len(_SENTENCES), count)]
    box = words["sum"] if right else words["wrong"]
    return "\n".join([*sentences, f"The answer is \\boxed{{{box}}}."])


def encode(tokenizer: Tokenizer, inputs: DataProto, texts: list[str], scores: list[float], seed: int = 0) -> DataProto:
    """Answers as a rollout: padded tokens, log-probs, and the reward on the last token."""
    end = [tokenizer.token_to_id("<|im_end|>")]
    return make_output(tokenizer, inputs, [tokenizer.encode(text).ids + end for text in texts], scores, seed)


def make_output(
    tokenizer: Tokenizer,
    inputs: DataProto,
    answers: list[list[int]],
    scores: list[float],
    seed: int = 0,
    width: int = RESPONSE_WIDTH,
) -> DataProto:
    """Same as ``encode``, for answers that are token ids."""
    rng = np.random.default_rng(seed)
    rows, pad = len(answers), tokenizer.token_to_id("<|endoftext|>")
    prompts, responses = np.full((rows, PROMPT_WIDTH), pad), np.full((rows, width), pad)
    mask = np.zeros((rows, PROMPT_WIDTH + width), np.int64)
    log_probs, rewards = np.zeros(responses.shape, np.float32), np.zeros(responses.shape, np.float32)
    for row, (messages, ids) in enumerate(zip(inputs.non_tensor_batch["raw_prompt"], answers, strict=True)):
        asked = f"<|im_start|>user\n{messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(asked).ids[-PROMPT_WIDTH:]
        ids = ids[:width]
        prompts[row, PROMPT_WIDTH - len(prompt) :] = prompt
        responses[row, : len(ids)] = ids
        mask[row, PROMPT_WIDTH - len(prompt) : PROMPT_WIDTH + len(ids)] = 1
        log_probs[row, : len(ids)] = -rng.gamma(0.35, 1.1, len(ids))
        if ids:
            rewards[row, len(ids) - 1] = scores[row]
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask[:, PROMPT_WIDTH:],
        "attention_mask": mask,
        "rollout_log_probs": log_probs,
        "rm_scores": rewards,
    }
    batch = TensorDict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}, [rows])
    right = np.array(scores) == 1.0
    return DataProto(batch=batch, non_tensor_batch={"acc": right.astype(np.float64)}, meta_info={"timing": {}})
