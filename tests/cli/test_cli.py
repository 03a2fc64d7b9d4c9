"""Runs ``rollout-skip`` in its own process on the recording of a training."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli_program import ROOT, assert_fits, assert_one_line_error, run, run_as_nobody, run_without_torch
from tests.entry_files import part_file
from tests.trainings import RUN_NAME, Engine, Training, inputs_of
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.store.record import record_bytes

K1, K2 = RolloutKey(1), RolloutKey(2)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("recorded"))
    training.record(K1, RolloutKey(1, 1), K2)
    training.record(K1, actor_rollout_ref__rollout__temperature=0.7)
    return training


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    training = Training(tmp_path)
    training.record(K1, K2)
    [variant] = training.variants()
    data = part_file(variant, 2)
    data.write_bytes(data.read_bytes()[:-10])
    return variant


def by_temperature(training: Training) -> dict[float, Path]:
    key = "actor_rollout_ref.rollout.temperature"
    return {json.loads((v / "manifest.json").read_text())["fingerprint"][key]: v for v in training.variants()}


def test_ls_lists_runs_variants_and_what_differs(recorded: Training) -> None:
    done = run("ls", recorded.dumps)
    assert done.returncode == 0, done.stderr
    assert RUN_NAME in done.stdout
    for variant in recorded.variants():
        assert variant.name in done.stdout
    assert "actor_rollout_ref.rollout.temperature: " in done.stdout
    assert "1-2" in done.stdout
    assert "1 × 8" in done.stdout
    assert_fits(done.stdout)


def test_ls_as_json_has_the_numbers(recorded: Training, capsys: Any) -> None:
    for path in (recorded.dumps, recorded.dumps / RUN_NAME):
        assert main(["ls", str(path), "--json"]) == 0
        [found] = json.loads(capsys.readouterr().out)["runs"]
        variants = {variant["path"]: variant for variant in found["variants"]}
        first = variants[str(by_temperature(recorded)[1.0])]
        store = RolloutStore(first["path"])
        records = [store.record(key) for key in store]
        assert (first["entries"], first["rows"], first["steps"]) == (3, 24, "1-2")
        assert first["bytes"] == sum(record.bytes for record in records)
        assert first["mean_score"] == pytest.approx(sum(record.mean_score for record in records) / 3)
        assert sorted(len(variant["differs"] or []) for variant in variants.values()) == [0, 1]


def test_ls_of_a_variant_lists_its_entries(recorded: Training, capsys: Any) -> None:
    variant = by_temperature(recorded)[1.0]
    for path in (f"{variant}", f"{variant}/", f"{variant}/manifest.json"):
        assert main(["ls", path]) == 0
        assert "generated in" in capsys.readouterr().out


def test_show_prints_the_record_and_samples(recorded: Training) -> None:
    variant = by_temperature(recorded)[1.0]
    done = run("show", variant, "--step", 2, "--row", 5)
    assert done.returncode == 0, done.stderr
    inputs = inputs_of(K2).non_tensor_batch
    assert inputs["raw_prompt"][5][0]["content"] in done.stdout
    assert inputs["reward_model"][5]["ground_truth"] in done.stdout
    assert "row 5, score " in done.stdout
    assert "--tokenizer" in done.stdout


def test_show_as_json_gives_the_tokens_without_padding(recorded: Training, capsys: Any) -> None:
    variant = by_temperature(recorded)[1.0]
    assert main(["show", str(variant), "--gen-batch", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["record"]["key"] == {"step": 1, "gen_batch": 1}
    assert [sample["row"] for sample in shown["samples"]] == [0, 1, 2]
    batch = RolloutStore(variant).get(RolloutKey(1, 1))
    for row, sample in enumerate(shown["samples"]):
        mask = batch.batch["response_mask"][row].bool()
        assert sample["response"] == batch.batch["responses"][row][mask].tolist()
        assert sample["score"] == float(batch.batch["rm_scores"][row].sum())


def test_show_decodes_with_a_tokenizer(recorded: Training, tmp_path: Path, capsys: Any) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(50_000)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    variant = by_temperature(recorded)[1.0]
    assert main(["show", str(variant), "--row", "0", "--tokenizer", str(tmp_path / "words"), "--json"]) == 0
    [sample] = json.loads(capsys.readouterr().out)["samples"]
    batch = RolloutStore(variant).get(K1)
    tokens = batch.batch["responses"][0][batch.batch["response_mask"][0].bool()].tolist()
    assert sample["response"].split() == [f"w{token}" for token in tokens]


def test_verify_accepts_intact_dumps(recorded: Training) -> None:
    done = run("verify", recorded.dumps)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 entries in 2 variants checked, no problems" in done.stdout


def test_verify_lists_damaged_entries_and_exits_with_1(damaged: Path, capsys: Any) -> None:
    done = run("verify", damaged)
    assert done.returncode == 1
    assert "step 2, generation batch 0 is damaged" in done.stdout
    assert "2 entries in 1 variant checked, 1 problem" in done.stdout
    assert main(["verify", str(damaged.parent), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert [(problem["step"], problem["gen_batch"]) for problem in found["problems"]] == [(2, 0)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_text(path.read_text().replace("1e-06", "2e-06")), "edited or damaged"),
        (lambda path: path.write_text("{"), "not a JSON object"),
        (lambda path: path.unlink(), "manifest.json is missing, so no training uses these rollouts"),
    ],
    ids=["edited", "broken", "missing"],
)
def test_verify_checks_the_manifest(tmp_path: Path, capsys: Any, spoil: Any, words: str) -> None:
    training = Training(tmp_path)
    training.record(K1)
    spoil(training.variants()[0] / "manifest.json")
    assert main(["verify", str(training.dumps), "--json"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert words in problem["error"]
    assert main(["ls", str(training.dumps)]) == 0, "intact entries are still listed"


def test_verify_says_how_to_restore_a_missing_manifest(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    training.record(K1)
    [variant] = training.variants()
    (variant / "manifest.json").unlink()
    assert main(["verify", str(training.dumps)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "start the training again with the recorded settings and rollout_skip.mode=cache" in shown
    renamed = variant.rename(variant.with_name("renamed"))
    assert main(["verify", str(renamed)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"rename the folder back to {variant.name}" in shown


def test_verify_names_an_entry_of_another_variant(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    training.record(K1, actor_rollout_ref__rollout__temperature=0.7)
    [other] = training.variants()
    training.record(K2)
    [mine] = [variant for variant in training.variants() if variant != other]
    (other / "step_000001").rename(mine / "step_000001")
    assert main(["verify", str(mine), "--json"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem["step"] == 1
    assert "was recorded with different settings than its manifest says" in problem["error"]


def test_verify_names_a_damaged_recording(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    training.record(K1)
    [recording] = (training.variants()[0] / "trainings").iterdir()
    recording.write_text(recording.read_text().replace("steps", "stops"))
    assert main(["verify", str(training.dumps), "--json"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert recording.name in problem["error"]


def test_verify_lists_entries_that_a_training_set_aside(damaged: Path, capsys: Any) -> None:
    training = Training(damaged.parents[2])
    with training.open("cache") as skip:
        skip.step(K2, inputs_of(K2), Engine())
    assert main(["verify", str(damaged)]) == 0
    assert "set aside earlier: " in capsys.readouterr().out


def test_ls_names_an_unreadable_entry(damaged: Path, capsys: Any) -> None:
    assert main(["ls", str(damaged), "--json"]) == 0
    [variant] = json.loads(capsys.readouterr().out)["runs"][0]["variants"]
    assert (variant["entries"], [bad["step"] for bad in variant["unreadable"]]) == (1, [2])


def test_recorded_text_cannot_control_the_terminal(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    inputs = inputs_of(K1)
    inputs.non_tensor_batch["raw_prompt"][0] = [{"role": "user", "content": "\x1b]0;evil\x07 [bold]x[/bold]"}]
    with training.open("record") as skip:
        skip.step(K1, inputs, Engine())
    assert main(["show", str(training.dumps), "--row", "0"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b]0;evil" in shown
    assert "[bold]x[/bold]" in shown


def test_an_error_that_quotes_a_file_name_cannot_control_the_terminal(tmp_path: Path) -> None:
    """The name is that of a folder, or of an argument that a shell expanded from it."""
    evil = tmp_path / "\x1b]0;evil\x07"
    done = run("ls", evil)
    assert_one_line_error(done, "\\x1b]0;evil\\x07 does not exist.")
    assert "\x1b" not in done.stderr
    done = run("ls", tmp_path, evil)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


def test_resume_escapes_recorded_text(capsys: Any) -> None:
    from verl_rollout_skip.cli.commands import resume
    from verl_rollout_skip.cli.output import make_console

    evil = "\x1b]0;evil\x07 [bold]"
    data = {
        "manifest": evil,
        "trainer": evil,
        "mode": evil,
        "recorded_steps": evil,
        "followed": {evil: evil},
        "trained": False,
    }
    resume.render(make_console(), data)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count("\\x1b]0;evil") == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "/does/not/exist"], "/does/not/exist does not exist."),
        (["ls", "{dumps}/../inputs"], "No recorded rollouts in "),
        (["ls", "nonsense://x"], "nonsense"),
        (["ls", "/does/not/exist://x"], "/does/not/exist://x does not exist."),
        (["show", "{dumps}"], "contains 2 variants. Choose one"),
        (["show", "{variant}", "--step", "9"], "step 9, generation batch 0 is not recorded"),
        (["show", "{variant}", "--step", "-1"], "RolloutKey.step"),
        (["show", "{variant}", "--row", "8"], "has rows 0 to 7, not 8"),
        (["show", "{variant}", "--tokenizer", "/nowhere"], "/nowhere is not a tokenizer folder"),
    ],
)
def test_an_error_is_one_line_with_exit_code_2(recorded: Training, capsys: Any, arguments: Any, words: str) -> None:
    variant = by_temperature(recorded)[1.0]
    assert main([argument.format(dumps=recorded.dumps, variant=variant) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("rollout-skip: error: ")
    assert output.err.count("\n") == 1
    assert words in output.err


COMMANDS_WITH_STEPS = {
    "ls": [],
    "stats": [],
    "verify": [],
    "show": [],
    "report": ["-o", "{out}/report.html"],
    "export": ["-o", "{out}/texts"],
    "copy": ["{out}/copy"],
    "diff": ["{variant}"],
    "prune": ["--yes"],
    "pin": [],
}


@pytest.mark.parametrize("command", list(COMMANDS_WITH_STEPS))
def test_a_step_that_is_not_recorded_is_an_error_that_lists_recorded_steps(
    recorded: Training, tmp_path: Path, capsys: Any, command: str
) -> None:
    variant = by_temperature(recorded)[1.0]
    rest = [word.format(out=tmp_path, variant=variant) for word in COMMANDS_WITH_STEPS[command]]
    ways = [[f"{variant}/step_000099"]]
    if command != "show":
        ways.append([str(variant), "--steps", "99"])
    for path, *options in ways:
        assert main([command, path, *rest, *options]) == 2
        output = capsys.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1)
        assert f"{variant} does not contain steps 99; it contains steps 1-2." in output.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "show", "copy"])
def test_a_generation_batch_that_is_not_recorded_is_an_error(
    recorded: Training, tmp_path: Path, capsys: Any, command: str
) -> None:
    variant = by_temperature(recorded)[1.0]
    rest = [word.format(out=tmp_path) for word in COMMANDS_WITH_STEPS[command]]
    assert main([command, f"{variant}/step_000001/gen_007.json", *rest]) == 2
    assert (
        "does not contain generation batch 7 of step 1; it contains generation batches [0, 1]."
        in capsys.readouterr().err
    )


def test_steps_of_several_variants_must_be_in_one_of_them(recorded: Training) -> None:
    assert run("verify", recorded.dumps, "--steps", 2).returncode == 0
    done = run("verify", recorded.dumps, "--steps", 99)
    assert_one_line_error(done, "None of the 2 variants in", "contains steps 99; they contain steps 1-2.")


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_an_unreadable_folder_is_a_one_line_error(tmp_path: Path, command: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    assert_one_line_error(run_as_nobody(command, closed), "Permission denied", str(closed))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lst"], ["No such command 'lst'.", "Did you mean 'ls'?", "See rollout-skip --help."]),
        (["ls", ".", "--stpes", "1"], ["'--stpes'", "Did you mean '--steps'?", "See rollout-skip ls --help."]),
        (["ls", ".", "--ste", "1"], ["No such option"]),
        (["show", ".", "--row", "x"], ["Invalid value for '--row': 'x' is not a valid integer."]),
        (["export", "."], ["Missing option '-o' / '--out'."]),
        (["diff", "."], ["Missing argument 'B'."]),
        ([], ["Missing command.", "See rollout-skip --help."]),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_an_error_with_a_suggestion(arguments: list[str], words: list[str], capsys: Any) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    for word in ["rollout-skip: error: ", *words]:
        assert word in output.err


def test_an_ascii_only_terminal_works(recorded: Training) -> None:
    done = run("ls", recorded.dumps, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_not_an_error(recorded: Training) -> None:
    command = f"{sys.executable} -m verl_rollout_skip.cli ls {recorded.dumps} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{RUN_NAME}\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "code"), [("ls", 0), ("ls --json", 0), ("verify", 1), ("--help", 0), ("ls --help", 0)]
)
def test_a_closed_pipe_does_not_change_the_exit_code(damaged: Path, command: str, code: int) -> None:
    script = f"{sys.executable} -m verl_rollout_skip.cli {command} {damaged} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)), "Broken pipe"),
        (EOFError("the connection was closed"), "the connection was closed"),
    ],
    ids=["broken pipe", "end of file"],
)
def test_a_lost_connection_is_an_error(
    tmp_path: Path, capsys: Any, monkeypatch: Any, error: Exception, message: str
) -> None:
    """Click would treat the first error as a closed pipe and the second as Ctrl-C."""

    def lost(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("verl_rollout_skip.cli.commands.ls.select", lost)
    assert main(["ls", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"rollout-skip: error: {message}\n"


def test_ls_shows_no_mean_if_an_entry_has_none(tmp_path: Path, capsys: Any) -> None:
    """The first entry has a NaN score, so the mean of the other entries must not be shown as the mean of all."""
    with RolloutStore(tmp_path) as store:
        for key in (K1, K2):
            batch = Engine()(inputs_of(key))
            batch.batch["rm_scores"][0, 0] = float("nan") if key == K1 else 0.0
            store.put(key, batch)
    assert main(["ls", str(tmp_path), "--json"]) == 0
    [variant] = json.loads(capsys.readouterr().out)["runs"][0]["variants"]
    assert variant["mean_score"] is None
    assert variant["mean_response_length"] is not None
    assert [entry["mean_score"] is None for entry in variant["records"]] == [True, False]
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[-3] == "–"


def test_tables_with_long_names_and_many_steps_fit_the_terminal(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(*(RolloutKey(step) for step in range(1, 40, 2)))
    [variant] = training.variants()
    long_name = variant.rename(variant.with_name("the-variant-with-the-very-long-name-" + "x" * 40))
    done = run("ls", long_name)
    assert done.returncode == 0, done.stderr
    assert_fits(done.stdout)
    assert "the-varia…" in done.stdout
    assert re.search(r" 1, ?3,[ 5,]*… ", done.stdout)
    done = run("copy", training.dumps, tmp_path / "copy")
    assert_fits(done.stdout.split("\nin ")[0])


@pytest.mark.parametrize("command", ["ls", "show"])
def test_torch_is_not_imported(recorded: Training, command: str) -> None:
    done = run_without_torch(command, recorded.dumps if command == "ls" else recorded.variants()[0])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ls_of_ten_thousand_entries_opens_no_parquet_file(tmp_path: Path) -> None:
    """The Parquet files are sparse, and every opened file is counted."""
    with RolloutStore(tmp_path / "one") as store:
        store.put(K1, Engine()(inputs_of(K1)))
    record = store.record(K1)
    for step in range(1, 10_001):
        folder = tmp_path / "many" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "gen_000.json").write_bytes(record_bytes(replace(record, key=RolloutKey(step))))
        with open(folder / record.parts[0].file, "wb") as file:
            os.truncate(file.fileno(), record.bytes)
    script = (
        "import sys; opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from verl_rollout_skip.cli import main; code = main(sys.argv[1:])\n"
        "names = [path.rsplit('.', 1)[-1] for path in opened if 'gen_' in path]\n"
        "print(code, names.count('parquet'), names.count('json'), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "ls", str(tmp_path / "many")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stderr == "0 0 10000\n"
    assert "1-10000" in done.stdout
    assert f"{10_000 * record.rows}" in done.stdout
    assert len(done.stdout.splitlines()) > 10_000


def test_help_has_examples_and_imports_no_large_package() -> None:
    script = (
        "import sys; from verl_rollout_skip.cli import main; assert main(['--help']) == 0\n"
        "assert not {'torch', 'numpy', 'pyarrow', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Examples:" in done.stdout


def test_it_works_without_verl(recorded: Training) -> None:
    script = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "sys.modules['verl'] = None; u.find_spec = lambda name, *a: None if name == 'verl' else real(name, *a)\n"
        "from verl_rollout_skip.cli import main; path = sys.argv[1]\n"
        "sys.exit(main(['verify', path]) or main(['ls', path]) or main(['show', path]))"
    )
    command = [sys.executable, "-c", script, str(by_temperature(recorded)[1.0])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_url_works_like_a_folder(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    url = "memory://cli/rollouts"
    training.record(K1, skip={"dump_dir": url})
    for command in ("ls", "show", "verify"):
        assert main([command, url]) == 0, capsys.readouterr().err
