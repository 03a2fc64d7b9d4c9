"""Content that rollouts depend on: a change is a miss, and a change of anything else is not."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from verl_rollout_skip.fingerprint.fingerprint import Fingerprint, difference, make_fingerprint

ROOT = Path(__file__).resolve().parents[2]
MODEL = "actor_rollout_ref.model.path"


def of_model(folder: Path, weights: str = "full") -> dict[str, Any]:
    return make_fingerprint(
        {"actor_rollout_ref": {"model": {"path": str(folder)}}, "rollout_skip": {"weights": weights}}
    ).rollout


def save_model(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """300 tensors, like a model with 24 layers; more than 8 MiB in total."""
    random = np.random.default_rng(0)
    shapes = {"embed_tokens": (600, 1000)}
    for layer in range(23):
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            shapes[f"layers.{layer}.{name}_proj"] = (100, 100)
        for name in ("input", "post"):
            shapes[f"layers.{layer}.{name}_layernorm"] = (1000,)
        for name in ("q", "k", "v"):
            shapes[f"layers.{layer}.{name}_bias"] = (100,)
        shapes[f"layers.{layer}.rope"] = (10,)
    return {name: random.random(shape, dtype=np.float32) for name, shape in shapes.items()}


def test_change_to_any_tensor_of_a_model_is_detected(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    assert len(tensors) == 300
    save_model(tmp_path / "model", tensors)
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 8 << 20
    before = of_model(tmp_path / "model")[MODEL]
    unnoticed, unnoticed_by_samples = [], []
    sampled = of_model(tmp_path / "model", "sampled")[MODEL]
    for name in [*[name for name in tensors if "layernorm" in name], "layers.3.gate_proj", "embed_tokens"]:
        changed = {**tensors, name: tensors[name].copy()}
        changed[name][0] += 1.0  # one row of the embeddings, the first number of a layer norm
        save_model(tmp_path / "model", changed)
        if of_model(tmp_path / "model")[MODEL] == before:
            unnoticed.append(name)
        if of_model(tmp_path / "model", "sampled")[MODEL] == sampled:
            unnoticed_by_samples.append(name)
    assert unnoticed == []
    assert len(unnoticed_by_samples) > 10, "so this is a change that samples miss"


def test_sampled_weights_are_reported_as_sampled(
    tmp_path: Path, tensors: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path / "model", tensors)
    full = of_model(tmp_path / "model")
    assert caplog.messages == []
    sampled = of_model(tmp_path / "model", "sampled")
    (message,) = caplog.messages
    assert "1 of them only sampled" in message
    assert "a change to the rest will not be noticed" in message
    (line,) = difference(full, sampled)
    assert "1 of them only sampled" in line.partition("→")[2]


def of_data(*files: Path, **keys: str) -> dict[str, Any]:
    return make_fingerprint({"data": {"train_files": [str(file) for file in files], **keys}}).rollout


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "pictures"
    folder.mkdir()
    files = [folder / f"{number}.png" for number in range(3)]
    for file in files:
        file.write_bytes(b"pixels")
        os.utime(file, (1_700_000_000, 1_700_000_000))
    return files


def rows_of(kind: str, pictures: list[Path]) -> dict[str, Any]:
    names = [str(file) for file in pictures]
    return {
        "text": {"images": [[name] for name in names]},
        "url": {"images": [[f"file://{name}"] for name in names]},
        "item": {"videos": [[{"type": "video", "video": name, "fps": 2}] for name in names]},
        "frames": {"videos": [[{"video": [name, name]}] for name in names]},
        "fixed": {"images": pa.array([[name, name] for name in names], pa.list_(pa.string(), 2))},
        "message": {
            "prompt": [[{"role": "user", "content": [{"type": "image", "image": name}]}] for name in names],
        },
    }[kind]


def write_rows(file: Path, rows: dict[str, Any]) -> None:
    count = len(next(iter(rows.values())))
    rows = {"prompt": [[{"role": "user", "content": "Look."}]] * count, **rows}
    if file.suffix == ".parquet":
        pq.write_table(pa.table(rows), file)
    else:
        rows = {name: column.to_pylist() if isinstance(column, pa.Array) else column for name, column in rows.items()}
        lines = [json.dumps({name: column[row] for name, column in rows.items()}) for row in range(count)]
        file.write_text("\n".join(lines) if file.suffix == ".jsonl" else f"[{','.join(lines)}]")


@pytest.mark.parametrize("kind", ["text", "url", "item", "frames", "fixed", "message"])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_image_named_in_a_row_is_part_of_the_data(tmp_path: Path, pictures: list[Path], kind: str, suffix: str) -> None:
    data = tmp_path / f"train{suffix}"
    write_rows(data, rows_of(kind, pictures))
    before = of_data(data)
    assert before["data.train_files#media"].startswith("3 files, 18 B, digest of paths, sizes and times ")
    assert of_data(data) == before
    pictures[1].write_bytes(b"PIXELS")
    (line,) = difference(before, of_data(data))
    assert line.startswith("data.train_files#media: ")


def test_image_columns_can_be_renamed_in_the_settings(tmp_path: Path, pictures: list[Path]) -> None:
    data = tmp_path / "train.parquet"
    write_rows(data, {"photos": [[str(file)] for file in pictures]})
    assert "data.train_files#media" not in of_data(data)
    assert "data.train_files#media" in of_data(data, image_key="photos")


def test_images_stored_in_the_data_file_are_covered_by_its_digest(tmp_path: Path) -> None:
    data = tmp_path / "train.parquet"
    write_rows(data, {"images": [[{"bytes": b"pixels", "path": "0.png"}]]})
    assert list(of_data(data)) == ["data.train_files"]


def test_missing_images_are_reported_but_urls_are_not(
    tmp_path: Path, pictures: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "train.parquet"
    write_rows(data, {"images": [["https://example.org/1.png"], ["data:image/png;base64,AAAA"]]})
    assert list(of_data(data)) == ["data.train_files"]
    pictures[0].unlink()
    write_rows(data, rows_of("text", pictures))
    assert "(1 of them: content not readable from here)" in of_data(data)["data.train_files#media"]
    assert "a change to its content will not be noticed" in caplog.text


@pytest.mark.parametrize("line", ["not JSON, with images", f'{{"images": {"[" * 100_000}'])
def test_data_that_cannot_be_searched_for_images_is_reported(
    tmp_path: Path, pictures: list[Path], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "train.jsonl"
    write_rows(data, rows_of("text", pictures))
    data.write_text(f'{data.read_text()}\n{line} "images"\n')
    media = of_data(data)["data.train_files#media"]
    assert media.startswith("3 files, 18 B")
    assert "train.jsonl cannot be searched for more" in media
    assert "a change to its content will not be noticed" in caplog.text


def test_very_many_images_are_sampled_and_the_fingerprint_says_so(
    tmp_path: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "train.parquet"
    write_rows(data, rows_of("text", pictures))
    monkeypatch.setattr("verl_rollout_skip.fingerprint.media._MAX_FILES", 2)
    assert of_data(data)["data.train_files#media"].startswith("3 files, only sampled: 2, 12 B")
    assert "only sampled: 2" in caplog.text


def test_one_data_file_equals_a_list_of_one(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_text("rows")
    one, listed, twice = (
        make_fingerprint({"data": {"train_files": files}}).config_hash
        for files in (str(file), [str(file)], [str(file), str(file)])
    )
    assert one == listed != twice


def of_variable(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        return make_fingerprint({}).config_hash


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_ATTENTION_BACKEND", "VLLM_USE_V1", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_BATCH_INVARIANT"),
        *("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "SGLANG_RETURN_ORIGINAL_LOGPROB", "SGL_ENABLE_JIT_DEEPGEMM"),
        *("VERL_FULL_DETERMINISM", "CUBLAS_WORKSPACE_CONFIG", "VLLM_A_VARIABLE_OF_THE_FUTURE"),
    ],
)
def test_environment_variable_that_engines_read_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        len(
            {make_fingerprint({}).config_hash, of_variable(name, "1", monkeypatch), of_variable(name, "2", monkeypatch)}
        )
        == 3
    )


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_HOST_IP", "VLLM_PORT", "VLLM_DP_MASTER_PORT", "VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_API_KEY"),
        *("VLLM_SERVICE_HOST", "VLLM_PORT_8000_TCP_ADDR", "VLLM_RPC_TIMEOUT", "VLLM_DISABLE_COMPILE_CACHE"),
        *("SGLANG_PORT", "SGLANG_LOG_MS", "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_DG_CACHE_DIR"),
        *("VERL_LOGGING_LEVEL", "VERL_ROLLOUT_SKIP_CACHE", "HOME", "SLURM_JOB_ID", "JUDGE_MODEL"),
    ],
)
def test_environment_variables_that_differ_between_nodes_are_ignored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of_variable(name, "1", monkeypatch) == of_variable(name, "2", monkeypatch)


def test_variable_counts_the_same_in_the_shell_and_in_runtime_env(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(**variables: Any) -> Fingerprint:
        return make_fingerprint({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": variables}}}})

    in_config = take(VLLM_ATTENTION_BACKEND="FLASHINFER", VLLM_USE_V1=1)
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    assert take() == in_config
    monkeypatch.setenv("VLLM_USE_V1", "0")
    assert difference(in_config.rollout, take().rollout) == ["environment.VLLM_USE_V1: 1 → 0"]
    assert take(VLLM_USE_V1="1") == in_config, "workers get what runtime_env says"


def test_variables_that_verl_sets_for_its_workers_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer runs in a Ray worker, ``rollout-skip resume`` and ``import`` do not."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    config = {"actor_rollout_ref": {"rollout": {"full_determinism": True}}}
    outside = make_fingerprint({}), make_fingerprint(config)
    for name, value in get_ppo_ray_runtime_env()["env_vars"].items():
        monkeypatch.setenv(name, value)
    inside = make_fingerprint({})
    monkeypatch.setenv("VERL_FULL_DETERMINISM", "1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert (inside, make_fingerprint(config)) == outside


def v1(mode: str, **settings: Any) -> dict[str, Any]:
    return {
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": mode,
        "trainer.v1.colocate_async.num_warmup_batches": 1,
        "trainer.v1.separate_async.parameter_sync_step": 4,
        "trainer.v1.sampler.max_off_policy_threshold": 8,
        **settings,
    }


@pytest.mark.parametrize(
    ("config", "key", "counts"),
    [
        (v1("sync", **{"trainer.use_v1": False}), "trainer.v1.trainer_mode", False),
        (v1("sync", **{"trainer.use_v1": False}), "trainer.v1.anything", False),
        (v1("sync"), "trainer.v1.separate_async.parameter_sync_step", False),
        (v1("skip_sync"), "trainer.v1.colocate_async.num_warmup_batches", False),
        (v1("sync"), "trainer.v1.sampler.max_off_policy_threshold", False),
        (v1("sync"), "trainer.v1.sync.new", True),
        (v1("sync"), "trainer.v1.sampler.new", True),
        (v1("sync"), "trainer.v1.new", True),
        (v1("skip_separate_async"), "trainer.v1.separate_async.parameter_sync_step", True),
        (v1("separate_async"), "trainer.v1.sampler.max_off_policy_threshold", True),
        (v1("my_mode"), "trainer.v1.separate_async.parameter_sync_step", True),
        (
            v1("sync", **{"trainer.v1.sampler.custom_sampler.path": "/s.py"}),
            "trainer.v1.sampler.max_off_policy_threshold",
            True,
        ),
    ],
)
def test_settings_of_trainers_that_are_not_used_are_ignored(config: dict[str, Any], key: str, counts: bool) -> None:
    before, after = make_fingerprint(config), make_fingerprint({**config, key: 99})
    assert (before.config_hash != after.config_hash) is counts
    assert before.training_hash == after.training_hash


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("algorithm.filter_groups.max_num_gen_batches", (10, 20)),
        ("actor_rollout_ref.rollout.load_format", ("dummy", "safetensors")),
        ("actor_rollout_ref.rollout.load_format", ("auto", "dummy_megatron")),
        ("actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode", ("strict", "disable")),
        ("actor_rollout_ref.rollout.enable_sleep_mode", (True, False)),
    ],
)
def test_settings_that_affect_neither_tokens_nor_rewards_are_ignored(key: str, values: tuple[Any, Any]) -> None:
    one, other = (make_fingerprint({key: value}) for value in values)
    assert one == other


@pytest.mark.parametrize("key", ["actor_rollout_ref.rollout.load_format", "reward.reward_model.rollout.load_format"])
def test_load_format_counts_if_it_changes_weights_or_they_are_never_synced(key: str) -> None:
    """A reward model is never synced: with dummy weights its scores are random."""
    other = "bitsandbytes" if key.startswith("actor") else "auto"
    assert make_fingerprint({key: "dummy"}).config_hash != make_fingerprint({key: other}).config_hash


def test_unknown_trainer_setting_is_reported_but_rollouts_are_used() -> None:
    before, after = (make_fingerprint({"trainer": {"my_recipe_knob": value}}) for value in (1, 2))
    assert before.config_hash == after.config_hash
    assert difference(before.training, after.training) == ["trainer.my_recipe_knob: 1 → 2"]


def test_code_of_a_custom_agent_loop_manager_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "own_manager_of_test.py"
    config = {"actor_rollout_ref.rollout.agent.agent_loop_manager_class": "own_manager_of_test.Manager"}
    module.write_text("class Manager: pass")
    before = make_fingerprint(config)
    module.write_text("class Manager: changed = True")
    after = make_fingerprint(config)
    assert before.config_hash != after.config_hash
    assert "own_manager_of_test.Manager in own_manager_of_test, 19 B" in str(before.rollout)


def test_files_named_in_a_tool_configuration_count(tmp_path: Path) -> None:
    """For example, a file with the MCP servers of a tool, which names a script."""
    script, servers, tools = tmp_path / "server.py", tmp_path / "servers.json", tmp_path / "tools.yaml"
    script.write_text("LIMIT = 1")
    servers.write_text(json.dumps({"mcpServers": {"search": {"command": "python", "args": [str(script)]}}}))
    tools.write_text(f"tools:\n  - config: {{type: mcp}}\n    mcp: {{mcp_servers_config_path: {servers}}}\n")
    config = {"actor_rollout_ref.rollout.multi_turn.tool_config_path": str(tools)}
    seen = {make_fingerprint(config).config_hash}
    script.write_text("LIMIT = 2")
    seen.add(make_fingerprint(config).config_hash)
    servers.write_text(servers.read_text().replace("search", "lookup"))
    seen.add(make_fingerprint(config).config_hash)
    assert len(seen) == 3
    tools.write_text(f"tools: [{tools}, {servers}, '~nobody/x', '{'x' * 5000}']")
    make_fingerprint(config)  # a file that names itself, and strings that are not paths


def test_large_file_named_in_a_tool_configuration_is_digested_but_not_parsed(tmp_path: Path) -> None:
    """The index of a search tool may be larger than memory."""
    index, listing, tools = tmp_path / "wiki.index", tmp_path / "listing.json", tmp_path / "tools.yaml"
    index.write_bytes(b"import json\n")  # if it were read as code, its imports would be followed
    listing.write_text(json.dumps([str(tmp_path / "gone")] * 100_000))
    tools.write_text(f"tools: [{index}, {listing}]")
    config = {"data.tool_config_path": str(tools)}
    (text,) = make_fingerprint(config).rollout.values()
    assert [part.split(",")[0] for part in text.split("; ")[1:]] == ["listing.json", "wiki.index"]
    index.write_bytes(b"other rows")
    assert make_fingerprint(config).rollout["data.tool_config_path"] != text


def test_modules_of_an_editable_install_are_followed(tmp_path: Path) -> None:
    """As with ``pip install -e`` of setuptools: found by an import hook, not on ``sys.path``."""
    from setuptools.command.editable_wheel import _finder_template

    source, site, project = tmp_path / "src" / "helpers_of_test", tmp_path / "site", tmp_path / "project"
    for folder in (source, site, project):
        folder.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    (source / "scores.py").write_text("BONUS = 1")
    finder = "__editable___helpers_finder"
    (site / f"{finder}.py").write_text(_finder_template("helpers", {"helpers_of_test": str(source)}, {}))
    (site / "__editable__.helpers.pth").write_text(f"import {finder}; {finder}.install()")
    reward = project / "reward.py"
    reward.write_text("from helpers_of_test.scores import BONUS")
    script = (
        "import site, sys; site.addsitedir(sys.argv[1])\n"
        "from verl_rollout_skip.fingerprint.source_code import code_identity; print(code_identity(sys.argv[2]))\n"
        "assert 'helpers_of_test' not in sys.modules"
    )

    def take() -> str:
        command = [sys.executable, "-c", script, str(site), str(reward)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    before = take()
    assert "helpers_of_test/scores.py" in before
    (source / "scores.py").write_text("BONUS = 2")
    assert take() != before


def test_log_in_the_model_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = of_model(tmp_path)
    (tmp_path / "train.log").write_text("step 1")
    with_log = of_model(tmp_path)
    (tmp_path / "unknown.dat").write_text("may be anything")
    assert before == with_log != of_model(tmp_path)


def test_processor_under_tokenizer_path_counts(tmp_path: Path) -> None:
    config = {"actor_rollout_ref.model.tokenizer_path": str(tmp_path)}
    (tmp_path / "tokenizer.json").write_text("{}")
    hashes = []
    for name in ("preprocessor_config.json", "tokenization_own.py"):
        for content in ("1", "2"):
            (tmp_path / name).write_text(content)
            hashes.append(make_fingerprint(config).config_hash)
    assert len(set(hashes)) == 4


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="verl_rollout_skip")


@pytest.mark.parametrize("argument", ["worker_extension_cls", "worker_cls", "scheduler_cls", "logits_processors"])
@pytest.mark.parametrize("name", ["own_engine_code.Own", "own_engine_code:Own"])
def test_code_that_the_engine_loads_by_name_counts_by_content(
    argument: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    value = [name] if argument == "logits_processors" else name
    config = {"actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {argument: value}}}}}
    found = []
    for text in ("class Own: ...", "class Own: changed = True"):
        (tmp_path / "own_engine_code.py").write_text(text)
        found.append(make_fingerprint(config).rollout)
    assert [line.partition(":")[0] for line in difference(*found)] == [
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.{argument}"
    ]


def test_a_class_of_the_engine_is_the_same_where_the_engine_is_not_installed() -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls"
    name = "vllm.v1.core.sched.scheduler.Scheduler"
    config = {"actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {"scheduler_cls": name}}}}}
    assert make_fingerprint(config).rollout == {key: name}
