"""``rollout-skip import``: dumps that verl 0.6.1, 0.7.1, 0.8.0 and 0.9.1 wrote with their own rollout skip.

The dumps in ``tests/upstream_dumps`` were made by each of those releases, see ``make.py`` there.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto

from tests.batches import assert_same_object
from tests.cli_program import assert_one_line_error, run, run_json
from tests.trainings import Engine, Training, contents, inputs_of, never
from tests.upstream_dumps import make
from verl_rollout_skip import Manifest, RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.errors import MismatchError

DUMPS = Path(__file__).parents[1] / "upstream_dumps"
ALL = ["0.6.1", "0.7.1", "0.8.0", "0.9.1", "0.9.1-v1"]
BELOW = Path("exp_proj", "GBS2_N2_in3_out5")


def dumps_of(version: str) -> Path:
    return DUMPS / f"verl-{version}"


def bring(capsys: Any, source: Path, target: Any, *options: Any, code: int = 0) -> dict[str, Any]:
    arguments = ["import", str(source), str(target), "--trust-pickle", *map(str, options), "--json"]
    assert main(arguments) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def keys_of(found: dict[str, Any]) -> list[tuple[int, int]]:
    return [(entry["step"], entry["gen_batch"]) for entry in found["entries"]]


def assert_output(batch: Any, call: int) -> None:
    """Compare the output of a generate call bit for bit, including object cells."""
    for name, expected in make.output(call).items():
        assert batch.batch[name].numpy().tobytes() == expected.tobytes(), name
    for name, column in make.output_columns(call).items():
        assert_same_object(batch.non_tensor_batch[name], column, name)
    assert batch.meta_info == {"timing": {"generate": 0.5}, "reward_extra_keys": ["acc"]}


def test_import_writes_entries_and_lists_them(tmp_path: Path) -> None:
    found = run_json("import", dumps_of("0.8.0"), tmp_path / "imported", "--trust-pickle")
    assert keys_of(found) == [(1, 0), (2, 0)]
    assert main(["verify", str(tmp_path / "imported")]) == 0


@pytest.mark.parametrize("version", ALL)
def test_dumps_of_each_verl_version_are_imported(version: str, tmp_path: Path, capsys: Any) -> None:
    found = bring(capsys, dumps_of(version), tmp_path / "imported")
    assert keys_of(found) == ([(1, 0)] if version < "0.8" else [(1, 0), (2, 0)])
    assert main(["verify", str(tmp_path / "imported")]) == 0


@pytest.mark.parametrize("version", ["0.6.1", "0.7.1"])
def test_the_single_file_of_old_versions_has_the_first_generate_call(version: str, tmp_path: Path, capsys: Any) -> None:
    """These versions keep only the first call, which was a validation here."""
    found = bring(capsys, dumps_of(version), tmp_path / "imported", "--step", 7)
    assert keys_of(found) == [(7, 0)]
    assert_output(RolloutStore(tmp_path / "imported").get(RolloutKey(7)), call=0)
    bring(capsys, dumps_of(version) / "exp_proj_GBS2__N2", tmp_path / "file")
    assert RolloutStore(tmp_path / "file").keys() == [RolloutKey(1)]


def test_dumps_of_0_8_have_inputs_and_training_steps(tmp_path: Path, capsys: Any) -> None:
    """verl 0.8 counts the validation as a step. Import takes the step from the input and skips the validation."""
    found = bring(capsys, dumps_of("0.8.0"), tmp_path / "imported")
    assert keys_of(found) == [(1, 0), (2, 0)]
    assert [skipped["reason"] for skipped in found["skipped"]] == ["a validation rollout"]
    assert all(entry["has_input"] for entry in found["entries"])
    store = RolloutStore(tmp_path / "imported")
    for step in (1, 2):
        assert_output(store.get(RolloutKey(step)), call=step)
        inputs = store.inputs(RolloutKey(step)).non_tensor_batch
        for name, column in make.input_columns(step).items():
            assert_same_object(inputs[name], column, name)
        assert inputs["reward_model"][0] is inputs["reward_model"][1], "rows that shared an answer still do"


def test_dumps_of_0_9_have_no_inputs_and_import_says_so(tmp_path: Path, capsys: Any) -> None:
    assert main(["import", str(dumps_of("0.9.1")), str(tmp_path / "imported"), "--trust-pickle"]) == 0
    output = capsys.readouterr().out
    assert "2 entries without input" in output
    assert "no training loads them" in output
    store = RolloutStore(tmp_path / "imported")
    for step in (1, 2):
        assert_output(store.get(RolloutKey(step)), call=step)
        assert store.inputs(RolloutKey(step)) is None


def test_sampled_batches_of_v1_keep_their_keys_and_tags(tmp_path: Path, capsys: Any) -> None:
    found = bring(capsys, dumps_of("0.9.1-v1"), tmp_path / "imported")
    assert keys_of(found) == [(1, 0), (2, 0)]
    batch = RolloutStore(tmp_path / "imported").get(RolloutKey(2))
    assert batch["responses"].is_nested
    assert torch.equal(torch.stack(batch["responses"].unbind()), torch.from_numpy(make.output(2)["responses"]))
    assert batch["tq_key"] == [f"uid-2-{row // 2}_{row % 2}_0" for row in range(4)]
    assert batch["tq_tag"][0] == {"status": "finished", "seq_len": 8}
    assert batch["raw_prompt"][0] == [{"role": "user", "content": "What is 2 + 0?"}]


def test_imported_entries_can_be_listed_shown_and_verified(tmp_path: Path, capsys: Any) -> None:
    bring(capsys, dumps_of("0.9.1"), tmp_path / "imported")
    for command in ("ls", "show", "stats", "verify"):
        assert main([command, str(tmp_path / "imported")]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["stats", str(tmp_path / "imported"), "--json"]) == 0
    [variant] = json.loads(capsys.readouterr().out)["variants"]
    assert variant["steps"][0]["pass_rate"] == 0.5


def test_without_a_configuration_the_settings_are_unknown(tmp_path: Path, capsys: Any) -> None:
    found = bring(capsys, dumps_of("0.8.0"), tmp_path / "imported")
    manifest = Manifest.load(found["destination"])
    assert manifest.config == {}
    [(key, value)] = manifest.fingerprint.items()
    assert key == "(settings)"
    assert value.startswith("not known (imported from ")
    assert "not known" in manifest.versions["verl"]


def training_like_the_dumps(folder: Path) -> tuple[Training, dict[str, Any]]:
    training = Training(folder)
    return training, {"data__train_batch_size": 2, "data__gen_batch_size": 2}


def dump_inputs(call: int) -> DataProto:
    return make.data_proto(None, make.input_columns(call), {"global_steps": call})


def test_a_training_uses_unknown_settings_only_with_reuse_and_marks_them_as_off_policy(
    tmp_path: Path, capsys: Any
) -> None:
    found = bring(capsys, dumps_of("0.8.0"), tmp_path / "imported")
    training, changes = training_like_the_dumps(tmp_path)
    source = {"source": found["destination"], "dump_dir": None}
    with pytest.raises(MismatchError, match=r"\(settings\): not known"):
        training.open("replay", source, **changes)
    with training.open("replay", {**source, "on_mismatch": "reuse"}, **changes) as replay:
        rollout = replay.step(RolloutKey(2), dump_inputs(2), never)
    assert rollout.hit
    assert rollout.metrics["rollout_skip/off_policy"] == 1.0
    assert torch.equal(rollout.batch.batch["responses"], torch.from_numpy(make.output(2)["responses"]))


def test_imported_responses_are_never_paired_with_other_prompts(tmp_path: Path, capsys: Any) -> None:
    found = bring(capsys, dumps_of("0.8.0"), tmp_path / "imported")
    training, changes = training_like_the_dumps(tmp_path)
    settings = {"source": found["destination"], "dump_dir": None, "on_mismatch": "reuse"}
    with training.open("replay", settings, **changes) as replay:
        with pytest.raises(MismatchError, match="a different input"):
            replay.step(RolloutKey(2), dump_inputs(1), never)


def test_no_training_loads_entries_without_input(tmp_path: Path, capsys: Any) -> None:
    found = bring(capsys, dumps_of("0.9.1"), tmp_path / "imported")
    training, changes = training_like_the_dumps(tmp_path)
    for prompts in ("check", "recorded"):
        settings = {"source": found["destination"], "dump_dir": None, "on_mismatch": "reuse", "prompts": prompts}
        with training.open("replay", settings, **changes) as replay:
            with pytest.raises(MismatchError, match=r"no prompts to compare|without its input"):
                replay.step(RolloutKey(2), dump_inputs(2), never)


def test_with_a_configuration_a_training_finds_imported_entries(tmp_path: Path, capsys: Any) -> None:
    """It also works if verl's own skip is enabled in that configuration and disabled now."""
    training, changes = training_like_the_dumps(tmp_path)
    config = training.config("off", **changes)
    skip = {"enable": True, "dump_dir": "/somewhere", "max_dump_step": 9, "action": "cache"}
    OmegaConf.update(config, "actor_rollout_ref.rollout.skip", skip, force_add=True)
    OmegaConf.save(config, tmp_path / "config.yaml")
    found = bring(capsys, dumps_of("0.8.0"), training.dumps, "--config", tmp_path / "config.yaml")
    assert found["settings_known"]
    assert found["destination"].startswith(f"{training.dumps}/exp_proj_TrainGBS2__InferGBS2__N2/")
    assert (Path(found["destination"]) / "tokenizer" / "tokenizer.json").exists()
    with training.open("replay", **changes) as replay:
        rollout = replay.step(RolloutKey(1), dump_inputs(1), never)
    assert rollout.hit
    assert rollout.metrics["rollout_skip/off_policy"] == 0.0
    with pytest.raises(MismatchError, match="temperature"):
        training.open("replay", actor_rollout_ref__rollout__temperature=0.5, **changes)


def test_with_a_configuration_import_says_that_the_user_vouches_for_it(tmp_path: Path, capsys: Any) -> None:
    training, changes = training_like_the_dumps(tmp_path)
    OmegaConf.save(training.config("off", **changes), tmp_path / "config.yaml")
    options = ["--config", str(tmp_path / "config.yaml"), "--trust-pickle"]
    assert main(["import", str(dumps_of("0.8.0")), str(training.dumps), *options]) == 0
    assert "you vouch that they are right" in capsys.readouterr().out


def test_importing_again_changes_nothing(tmp_path: Path, capsys: Any) -> None:
    bring(capsys, dumps_of("0.8.0"), tmp_path / "imported")
    before = contents(tmp_path / "imported")
    bring(capsys, dumps_of("0.8.0"), tmp_path / "imported")
    assert contents(tmp_path / "imported") == before


def test_generation_batches_of_a_step_keep_their_numbers(tmp_path: Path, capsys: Any) -> None:
    """DAPO makes three calls in step 5. The second dump is truncated, and the third keeps its number."""
    root = tmp_path / "dumps"
    for gen_step in (1, 2, 3):
        folder = root / f"genstep_{gen_step:06d}"
        folder.mkdir(parents=True)
        make.data_proto(None, make.input_columns(gen_step), {"global_steps": 5}).save_to_disk(folder / "new_batch.dp")
        make.generated(gen_step).save_to_disk(folder / "gen_batch.dp")
        (folder / "meta.json").write_text(json.dumps({"global_steps": 5, "gen_steps": gen_step}))
    damaged = root / "genstep_000002" / "gen_batch.dp"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    found = bring(capsys, root, tmp_path / "imported", code=1)
    assert keys_of(found) == [(5, 0), (5, 2)]
    assert [problem["path"] for problem in found["problems"]] == [str(damaged)]
    assert_output(RolloutStore(tmp_path / "imported").get(RolloutKey(5, 2)), call=3)


def test_an_input_with_one_row_per_prompt_is_repeated_for_its_responses(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "dumps" / "genstep_000001"
    folder.mkdir(parents=True)
    prompts = {name: column[::2] for name, column in make.input_columns(1).items()}
    DataProto(None, prompts, {"global_steps": 1}).save_to_disk(folder / "new_batch.dp")
    make.generated(1).save_to_disk(folder / "gen_batch.dp")
    (folder / "meta.json").write_text('{"global_steps": 1, "gen_steps": 1}')
    bring(capsys, tmp_path / "dumps", tmp_path / "imported")
    inputs = RolloutStore(tmp_path / "imported").inputs(RolloutKey(1)).non_tensor_batch
    assert_same_object(inputs["reward_model"], make.input_columns(1)["reward_model"])


def test_an_incomplete_dump_is_skipped(tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(dumps_of("0.9.1"), tmp_path / "dumps")
    (tmp_path / "dumps" / BELOW / "2" / "meta.json").unlink()
    found = bring(capsys, tmp_path / "dumps", tmp_path / "imported")
    assert keys_of(found) == [(1, 0)]
    assert "files are missing" in found["skipped"][0]["reason"]


def test_dumps_serialized_without_torch_are_read(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", "numpy")
    make.generated(4).save_to_disk(tmp_path / "exp_proj_GBS2__N2")
    monkeypatch.delenv("VERL_DATAPROTO_SERIALIZATION_METHOD")
    bring(capsys, tmp_path / "exp_proj_GBS2__N2", tmp_path / "imported")
    assert_output(RolloutStore(tmp_path / "imported").get(RolloutKey(1)), call=4)


def test_a_real_rollout_is_imported_bit_for_bit(tmp_path: Path, capsys: Any) -> None:
    from tests.batches import assert_same_batch

    batch = Engine()(inputs_of(RolloutKey(1)))
    batch.save_to_disk(tmp_path / "exp_proj_GBS4__N2")
    bring(capsys, tmp_path / "exp_proj_GBS4__N2", tmp_path / "imported")
    assert_same_batch(
        DataProto.load_from_disk(tmp_path / "exp_proj_GBS4__N2"), RolloutStore(tmp_path / "imported").get(RolloutKey(1))
    )


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch marker",)


@pytest.mark.parametrize("where", ["whole file", "column", "tensors"])
def test_a_hostile_dump_stops_the_import_and_is_not_executed(tmp_path: Path, where: str) -> None:
    shutil.copytree(dumps_of("0.9.1"), tmp_path / "dumps")
    path = tmp_path / "dumps" / BELOW / "2" / "gen_batch.dp"
    batch = make.generated(2)
    if where == "whole file":
        path.write_bytes(pickle.dumps(Evil()))
    elif where == "column":
        batch.non_tensor_batch["evil"] = np.array([Evil()] * 4, dtype=object)
        batch.save_to_disk(path)
    else:
        from tensordict import NonTensorData

        batch.batch.set("evil", NonTensorData(Evil(), batch_size=[4]))
        batch.save_to_disk(path)
    done = run("import", tmp_path / "dumps", tmp_path / "imported", "--trust-pickle", cwd=tmp_path)
    assert_one_line_error(
        done, "is rejected", "system", "None of its code was executed", "1 dumps were imported before"
    )
    assert not (tmp_path / "marker").exists()


def array_of(*cells: Any) -> np.ndarray:
    array = np.empty(len(cells), dtype=object)
    array[:] = cells
    return array


ODD: dict[str, tuple[dict[Any, Any], dict[Any, Any], str]] = {
    "a column that is a list": ({"a": [1, 2, 3, 4]}, {}, "column a is a list, not an array with rows"),
    "a column that is a number": ({"a": np.array(5)}, {}, "column a is a ndarray, not an array with rows"),
    "a column that is too short": ({"a": array_of("x", "y", "z")}, {}, "column a has 3 rows instead of 4"),
    "a column without a name": ({5: array_of("x", "y", "z", "w")}, {}, "column 5 is a ndarray"),
    "a key that is not a string": ({}, {5: 1, "a": 2}, ""),
    "a number of many bits": ({}, {"n": 1 << 100_000}, ""),
    "a type that cannot be stored": ({"a": array_of(*[{1, 2}] * 4)}, {}, "builtins.set"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_malformed_dump_is_reported_and_the_others_are_imported(name: str, tmp_path: Path, capsys: Any) -> None:
    columns, meta, words = ODD[name]
    shutil.copytree(dumps_of("0.8.0"), tmp_path / "dumps")
    folder = tmp_path / "dumps" / BELOW / "genstep_000002"
    odd = make.data_proto(None, make.input_columns(1), {"global_steps": 1})
    odd.non_tensor_batch.update(columns)
    odd.meta_info.update(meta)
    (folder / "new_batch.dp").write_bytes(pickle.dumps(odd))
    arguments = ["import", str(tmp_path / "dumps"), str(tmp_path / "imported"), "--trust-pickle", "--json"]
    code = main(arguments)
    found = json.loads(capsys.readouterr().out)
    assert (2, 0) in keys_of(found)
    if words:
        assert code == 1
        assert words in found["problems"][0]["error"]
    assert code == (1 if found["problems"] else 0)
    assert main(["verify", str(tmp_path / "imported")]) == 0


def test_an_unreadable_dump_is_reported(tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(dumps_of("0.9.1"), tmp_path / "dumps")
    path = tmp_path / "dumps" / BELOW / "1" / "gen_batch.dp"
    path.write_bytes(b"")
    found = bring(capsys, tmp_path / "dumps", tmp_path / "imported", code=1)
    assert keys_of(found) == [(2, 0)]
    assert [problem["path"] for problem in found["problems"]] == [str(path)]


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), pickle.dumps({"a": 1}), b"", b"}N" + b"2\x86" * 60 + b"Ns."])
def test_a_rejected_file_leaves_no_destination(tmp_path: Path, capsys: Any, content: bytes) -> None:
    (tmp_path / "x_GBS1__N1").write_bytes(content)
    arguments = ["import", str(tmp_path / "x_GBS1__N1"), str(tmp_path / "imported"), "--trust-pickle"]
    assert main(arguments) == (2 if b"system" in content else 1)
    assert "manifest" not in capsys.readouterr().out
    assert not (tmp_path / "imported").exists()


def test_without_trust_pickle_nothing_is_read(tmp_path: Path) -> None:
    done = run("import", dumps_of("0.8.0"), tmp_path / "imported")
    assert_one_line_error(done, "--trust-pickle")
    assert not (tmp_path / "imported").exists()


def test_bad_input_is_a_one_line_error_with_exit_code_2(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "small.yaml").write_text("trainer: {experiment_name: a, project_name: b}\n")
    cases: list[tuple[list[Any], str]] = [
        (["/does/not/exist", tmp_path / "x"], "/does/not/exist does not exist."),
        ([tmp_path / "empty", tmp_path / "x"], "contains no dumps of verl's rollout skip"),
        ([DUMPS, tmp_path / "x"], "contains several recordings, choose one"),
        ([dumps_of("0.8.0"), tmp_path / "x", "--config", "/nowhere.yaml"], "No such file or directory: /nowhere.yaml"),
        ([dumps_of("0.8.0"), tmp_path / "x", "--config", tmp_path / "broken.yaml"], "cannot be read as a YAML"),
        ([dumps_of("0.8.0"), tmp_path / "x", "--config", tmp_path / "list.yaml"], "it contains a list"),
        ([dumps_of("0.8.0"), tmp_path / "x", "--config", tmp_path / "small.yaml"], "data.train_batch_size is None"),
    ]
    for arguments, words in cases:
        assert main(["import", *map(str, arguments), "--trust-pickle"]) == 2, words
        output = capsys.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1)
        assert words in output.err
        assert not (tmp_path / "x").exists()
    assert_one_line_error(run("import", *cases[0][0], "--trust-pickle"), cases[0][1])


def test_a_destination_with_other_settings_is_refused(tmp_path: Path, capsys: Any) -> None:
    bring(capsys, dumps_of("0.8.0"), tmp_path / "imported")
    assert main(["import", str(dumps_of("0.9.1")), str(tmp_path / "imported"), "--trust-pickle"]) == 2
    assert "belongs to rollouts with different settings" in capsys.readouterr().err


def test_a_file_that_is_not_a_dump_is_reported(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x_GBS1__N1").write_bytes(pickle.dumps({"a": 1}))
    found = bring(capsys, tmp_path / "x_GBS1__N1", tmp_path / "imported", code=1)
    assert found["problems"][0]["error"] == "It contains a dict, not a DataProto."
