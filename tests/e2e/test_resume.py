"""``rollout-skip resume`` as printed at the end of a training, run from elsewhere, after everything was moved."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from recipes.cpu import runs
from recipes.cpu.assets import make_assets
from tests.e2e.shell import command_environment
from tests.e2e.training import Finished, Trainings, assert_same_results, variant_in
from verl_rollout_skip import RolloutStore


def run_command(command: str, folder: Path, assets: Path) -> Finished:
    """Run what was printed, in a shell, in another working directory."""
    environment = command_environment(folder, runs.prepare(folder, assets))
    with open(folder / "log", "wb") as log:
        process = subprocess.run(command, shell=True, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return Finished(folder, process.returncode)


def test_the_printed_command_goes_on_with_the_training(trainings: Trainings, tmp_path: Path) -> None:
    settings = ("trainer.save_freq=2", f"rollout_skip.dump_dir={tmp_path}/dumps")
    whole = trainings.run("whole", "trainer.total_training_steps=5", *settings, "rollout_skip.mode=off")
    begun = trainings.run("begun", "trainer.total_training_steps=2", *settings, "rollout_skip.mode=record")
    (command,) = [re.search(r"rollout-skip resume \S+", text) for text in begun.messages if "resume" in text]
    assert command is not None
    resumed = run_command(f"{command[0]} trainer.total_training_steps=4", tmp_path / "resumed", trainings.assets)
    assert resumed.exit_code == 0, resumed.log[-5000:]
    assert resumed.hits() == [1, 2]
    assert_same_results(whole, resumed, steps=[1, 2, 3, 4])
    assert not any("off-policy" in text for text in resumed.messages)
    assert [key.step for key in RolloutStore(variant_in(tmp_path / "dumps"))] == [1, 2, 3, 4]
    check_moved(whole, begun.folder / "checkpoints" / "global_step_2", tmp_path, trainings)


def check_moved(whole: Finished, checkpoint: Path, tmp_path: Path, trainings: Trainings) -> None:
    """The run folder and the model are elsewhere now; it goes on there, from a checkpoint in the middle."""
    moved = shutil.move(tmp_path / "dumps", tmp_path / "moved")
    manifest = next(Path(moved).glob("*/*/manifest.json"))
    assets = shutil.copytree(trainings.assets, tmp_path / "assets")
    paths = {
        "actor_rollout_ref.model.path": "model",
        "data.train_files": "train.parquet",
        "data.val_files": "val.parquet",
    }
    remapped = [f"{key}={assets}/{name}" for key, name in paths.items()]
    command = f"rollout-skip resume {shlex.quote(str(manifest))} {' '.join(remapped)}"
    looked_at = run_command(f"{command} --dry-run", tmp_path / "dry", assets)
    assert looked_at.exit_code == 0, looked_at.log
    assert "steps 1-4 are recorded" in looked_at.log
    assert "critic.model.path followed to" in looked_at.log
    start = f"trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint} trainer.total_training_steps=5"
    resumed = run_command(f"{command} {start}", tmp_path / "from-checkpoint", assets)
    assert resumed.exit_code == 0, resumed.log[-5000:]
    assert resumed.hits() == [3, 4]
    assert_same_results(whole, resumed, steps=[3, 4, 5])
    other = make_assets(tmp_path / "other-model", seed=5).folder
    refused = run_command(
        f"rollout-skip resume {manifest} actor_rollout_ref.model.path={other}/model", tmp_path / "no", other
    )
    assert refused.exit_code == 2
    assert "made with other settings" in refused.log
    assert "actor_rollout_ref.model.path" in refused.log
