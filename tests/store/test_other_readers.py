"""Dumps are readable by anyone, without this package or verl.

Every reader runs in a separate process that cannot import the modules it must do without.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl import DataProto

from tests.batches import rollout_input, rollout_output
from tests.entry_files import part_file, record_file
from verl_rollout_skip import RolloutKey, RolloutStore

REPOSITORY = Path(__file__).parents[2]
KEYS = [RolloutKey(1, 0), RolloutKey(2, 0), RolloutKey(2, 1), RolloutKey(13, 0)]

# A module that is None in sys.modules is, for import and for importlib.util.find_spec, a module that is not installed.
WITHOUT = """
import json, sys

for name in {refused}:
    sys.modules[name] = None
    try:
        __import__(name)
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit(f"{{name}} could be imported")

def imported(*names):
    return [name for name in names if sys.modules.get(name) is not None]
"""


def run(script: str, *, without: list[str], ours: bool = False) -> Any:
    """Run a script that prints JSON in a clean process in which some modules do not exist; returns the JSON."""
    lines = [WITHOUT.format(refused=without)]
    if ours:
        lines.append(f"sys.path.insert(0, {str(REPOSITORY)!r})")
    lines.append(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "-I", "-c", "\n".join(lines)],
        cwd="/tmp",
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def seed_of(key: RolloutKey) -> int:
    return 10 * key.step + key.gen_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with several steps, one of them with two generation batches."""
    path = tmp_path_factory.mktemp("run")
    with RolloutStore(path) as store:
        for key in KEYS:
            seed = seed_of(key)
            store.put(key, rollout_output(seed=seed), inputs=rollout_input(seed=seed), info={"seed": seed})
    return path


def expected_rows(key: RolloutKey) -> list[list[Any]]:
    """What every reader must find: response tokens, score and the text of the prompt, row by row."""
    output, given = rollout_output(seed=seed_of(key)), rollout_input(seed=seed_of(key))
    rows = []
    for row in range(len(output)):
        tokens = output.batch["responses"][row][output.batch["response_mask"][row].bool()].tolist()
        score = output.batch["rm_scores"][row].sum().item()
        rows.append([tokens, score, given.non_tensor_batch["raw_prompt"][row][0]["content"]])
    return rows


def file_of(folder: Path, key: RolloutKey) -> Path:
    return part_file(folder, key.step, key.gen_batch)


def test_pyarrow_alone_reads_a_dump(folder: Path) -> None:
    rows = run(
        f"""
        import pyarrow.parquet as pq
        table = pq.read_table({str(file_of(folder, KEYS[0]))!r})
        prompts = [json.loads(cell)[0]["content"] for cell in table["in__raw_prompt"].to_pylist()]
        columns = [table["responses"].to_pylist(), table["skip__score"].to_pylist(), prompts]
        print(json.dumps(list(zip(*columns))))
        """,
        without=["verl_rollout_skip", "torch", "verl", "ray"],
    )
    assert rows == expected_rows(KEYS[0])


def test_duckdb_reads_a_dump(folder: Path) -> None:
    rows = run(
        f"""
        import duckdb
        query = '''
            select responses, skip__score, in__raw_prompt->'$[0]'->>'content',
                   len(responses) = skip__response_length, len(rollout_log_probs) = skip__response_length
            from read_parquet(?)
        '''
        print(json.dumps(duckdb.execute(query, [{str(file_of(folder, KEYS[1]))!r}]).fetchall()))
        """,
        without=["verl_rollout_skip", "torch", "verl", "ray"],
    )
    assert rows == [[*row, True, True] for row in expected_rows(KEYS[1])]


def test_duckdb_asks_questions_over_all_steps_at_once(folder: Path) -> None:
    found = run(
        f"""
        import duckdb
        query = '''
            select parse_path(filename)[-2] as step, parse_path(filename)[-1] as part, count(*), sum(skip__score),
                   max(skip__response_length), count(distinct skip__prompt_digest)
            from read_parquet(?, filename = true) group by all order by all
        '''
        print(json.dumps(duckdb.execute(query, [{str(folder / "step_*/gen_*.parquet")!r}]).fetchall()))
        """,
        without=["verl_rollout_skip", "torch", "verl", "ray"],
    )
    expected = []
    for key in KEYS:
        rows = expected_rows(key)
        where = [f"step_{key.step:06d}", file_of(folder, key).name]
        expected.append([*where, 8, sum(row[1] for row in rows), max(len(row[0]) for row in rows), 4])
    assert found == expected


def test_pandas_reads_a_dump(folder: Path) -> None:
    found = run(
        f"""
        import pandas
        frame = pandas.read_parquet({str(file_of(folder, KEYS[2]))!r})
        prompts = frame["in__raw_prompt"].map(lambda cell: json.loads(cell)[0]["content"])
        rows = [[list(map(int, tokens)), float(score), prompt]
                for tokens, score, prompt in zip(frame["responses"], frame["skip__score"], prompts)]
        mean = frame.groupby("skip__prompt_digest", sort=False)["acc"].mean().tolist()
        print(json.dumps([rows, mean]))
        """,
        without=["verl_rollout_skip", "torch", "verl", "ray"],
    )
    accuracy = rollout_output(seed=seed_of(KEYS[2])).non_tensor_batch["acc"]
    assert found == [expected_rows(KEYS[2]), accuracy.reshape(4, 2).mean(axis=1).tolist()]


def test_hugging_face_datasets_reads_a_run(folder: Path, tmp_path: Path) -> None:
    rows = run(
        f"""
        import datasets
        datasets.disable_progress_bars()
        run = datasets.load_dataset("parquet", data_files={str(folder / "step_*/gen_*.parquet")!r}, split="train",
                                    cache_dir={str(tmp_path)!r})
        print(json.dumps([[row["responses"], row["skip__score"], json.loads(row["in__raw_prompt"])[0]["content"]]
                          for row in run]))
        """,
        without=["verl_rollout_skip", "verl", "ray"],
    )
    assert rows == [row for key in KEYS for row in expected_rows(key)]


def test_the_record_next_to_a_dump_is_readable_json(folder: Path) -> None:
    for key in KEYS:
        record = json.loads(record_file(folder, key.step, key.gen_batch).read_text())
        rows = expected_rows(key)
        assert record["rows"] == len(rows)
        assert record["info"] == {"seed": seed_of(key)}
        assert record["mean_score"] == pytest.approx(sum(row[1] for row in rows) / len(rows))
        assert record["response_tokens"] == sum(len(row[0]) for row in rows)


READ_AS_TENSORDICT = """
    from verl_rollout_skip import RolloutKey, RolloutStore
    with RolloutStore({folder!r}) as store:
        batch, given = store.get(RolloutKey(1){kind}), store.inputs(RolloutKey(1){kind})
        keys = [[key.step, key.gen_batch] for key in store.keys()]
    print(json.dumps({{
        "type": type(batch).__name__,
        "keys": keys,
        "tensors": {{key: [str(value.dtype), list(value.shape), value.numpy().tobytes().hex()]
                    for key, value in batch.items() if type(value).__name__ == "Tensor"}},
        "acc": batch.get("acc").tolist(),
        "timing": batch["timing"],
        "raw_prompt": given.get("raw_prompt").tolist(),
        "imported": imported("verl", "ray"),
    }}))
"""


@pytest.mark.parametrize(
    ("without", "kind"),
    [(["verl", "ray"], ""), (["ray"], ", kind='TensorDict'")],
    ids=["verl not installed", "asked for"],
)
def test_a_recorded_dataproto_reads_as_a_tensordict_without_verl(folder: Path, without: list[str], kind: str) -> None:
    found = run(READ_AS_TENSORDICT.format(folder=str(folder), kind=kind), without=without, ours=True)
    output = rollout_output(seed=seed_of(KEYS[0]))
    assert found["type"] == "TensorDict"
    assert found["keys"] == [[key.step, key.gen_batch] for key in KEYS]
    assert found["tensors"] == {
        key: [str(value.dtype), list(value.shape), value.numpy().tobytes().hex()] for key, value in output.batch.items()
    }
    assert found["acc"] == output.non_tensor_batch["acc"].tolist()
    assert found["timing"] == output.meta_info["timing"]
    assert found["raw_prompt"] == rollout_input(seed=seed_of(KEYS[0])).non_tensor_batch["raw_prompt"].tolist()
    assert found["imported"] == []


def test_reading_and_writing_tensordicts_imports_neither_verl_nor_ray(tmp_path: Path) -> None:
    found = run(
        f"""
        import torch
        from tensordict import TensorDict
        from verl_rollout_skip import RolloutKey, RolloutStore
        with RolloutStore({str(tmp_path)!r}) as store:
            store.put(RolloutKey(3), TensorDict({{"responses": torch.arange(6).reshape(2, 3)}}, batch_size=[2]))
        with RolloutStore({str(tmp_path)!r}) as store:
            tokens = store.get(RolloutKey(3))["responses"].tolist()
            store.verify(RolloutKey(3))
        print(json.dumps([tokens, imported("verl", "ray")]))
        """,
        without=[],
        ours=True,
    )
    assert found == [[[0, 1, 2], [3, 4, 5]], []]


def test_importing_the_package_is_quick_and_imports_nothing_heavy() -> None:
    found = run(
        """
        import verl_rollout_skip
        heavy = imported("torch", "verl", "ray", "numpy", "pyarrow", "tensordict", "transformers")
        print(json.dumps([heavy, "RolloutStore" in dir(verl_rollout_skip)]))
        """,
        without=[],
        ours=True,
    )
    assert found == [[], True]


def test_what_this_process_wrote_is_a_dataproto_again(folder: Path) -> None:
    with RolloutStore(folder) as store:
        assert type(store.get(KEYS[0])) is DataProto
        as_tensordict = store.get(KEYS[0], kind="TensorDict")
        assert type(as_tensordict) is TensorDict
        assert torch.equal(as_tensordict["responses"], store.get(KEYS[0]).batch["responses"])
