"""Code is identified by its source and by the modules of its project that it imports, without running it."""

from __future__ import annotations

import linecache
import os
from pathlib import Path
from typing import Any

import pytest

from verl_rollout_skip.fingerprint.identity import UNREADABLE, file_identity
from verl_rollout_skip.fingerprint.source_code import class_identity, classes_identity, code_identity, module_identity


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A reward function, modules that it imports, and modules that it does not import."""
    files = {
        "reward.py": "import json, numpy\nimport parsing\nfrom rules.units import convert\n",
        "parsing.py": "from tables import UNITS\nraise RuntimeError('imported')\n",
        "tables.py": "UNITS = 1\n",
        "rules/__init__.py": "",
        "rules/units.py": "from . import lengths\n",
        "rules/lengths.py": "METRE = 1\n",
        "rules/unused.py": "",
        "losses.py": "",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["reward.py", "parsing.py", "tables.py", "rules/__init__.py", "rules/units.py", "rules/lengths.py"]
)
def test_change_to_an_imported_module_is_detected_and_named(project: Path, name: str) -> None:
    before = code_identity(str(project / "reward.py"))
    with open(project / name, "a") as file:
        file.write("# changed\n")
    after = code_identity(str(project / "reward.py"))
    assert after != before
    if name != "reward.py":
        (changed,) = set(after.split(", ")) - set(before.split(", "))
        assert name in changed


@pytest.mark.parametrize("name", ["losses.py", "rules/unused.py"])
def test_modules_that_are_not_imported_are_ignored(project: Path, name: str) -> None:
    before = code_identity(str(project / "reward.py"))
    (project / name).write_text("changed = True")
    assert code_identity(str(project / "reward.py")) == before


def test_file_without_project_imports_is_identified_alone(project: Path) -> None:
    assert code_identity(str(project / "tables.py")) == file_identity(str(project / "tables.py"))
    (project / "broken.py").write_text("def (")
    assert code_identity(str(project / "broken.py")) == file_identity(str(project / "broken.py"))


def test_project_in_another_folder_is_the_same(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = project.rename(tmp_path_factory.mktemp("other") / "project")
    moved = code_identity(str(elsewhere / "reward.py"))
    assert moved == code_identity(str(elsewhere.rename(project) / "reward.py"))


def test_clone_under_another_name_is_the_same(tmp_path: Path) -> None:
    """Even if a file imports modules from a parent folder."""
    identities = set()
    for clone in ("clone", "another-clone"):
        package = tmp_path / clone / "pack"
        (package / "scores").mkdir(parents=True)
        for name in ("__init__.py", "scores/__init__.py", "common.py"):
            (package / name).write_text("")
        (package / "scores" / "reward.py").write_text("from pack import common\nfrom ..common import check\n")
        identities.add(code_identity(str(package / "scores" / "reward.py")))
    (identity,) = identities
    assert "pack/common.py" in identity


def test_absolute_imports_within_a_package_are_followed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = project / "pack_of_test" / "scores"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "math.py").write_text("from pack_of_test.helpers import check\nimport torch\n")
    (package.parent / "helpers.py").write_text("v1")
    monkeypatch.syspath_prepend(str(project))
    before = module_identity("pack_of_test.scores.math")
    assert code_identity("pkg://pack_of_test.scores.math") == before
    (package.parent / "helpers.py").write_text("v2")
    assert module_identity("pack_of_test.scores.math") != before


def test_many_imports_are_counted_instead_of_named(project: Path) -> None:
    names = [f"part{number}" for number in range(30)]
    for name in names:
        (project / f"{name}.py").write_text("")
    (project / "large.py").write_text("\n".join(f"import {name}" for name in names))
    before = code_identity(str(project / "large.py"))
    assert ", with 30 modules that it imports, digest " in before
    (project / "part7.py").write_text("changed = 1")
    assert code_identity(str(project / "large.py")) != before


def test_circular_imports_do_not_loop(project: Path) -> None:
    (project / "one.py").write_text("import two")
    (project / "two.py").write_text("import one")
    assert "with two.py " in code_identity(str(project / "one.py"))


def test_installed_packages_are_not_followed() -> None:
    assert ", with " not in module_identity("verl.utils.reward_score.gsm8k")
    assert ", with " not in module_identity("omegaconf")


@pytest.mark.parametrize("key", ["class_name", "_target_"])
def test_classes_named_in_a_tool_configuration_count(project: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.syspath_prepend(str(project))
    module = project / f"tool_of_test_{key.strip('_')}.py"
    module.write_text("class Tool: pass")
    config = project / "tools.yaml"
    config.write_text(f"tools:\n  - {key}: {module.stem}.Tool\n    config: {{type: native}}\n")
    before = classes_identity(str(config))
    module.write_text("class Tool: changed = True")
    assert classes_identity(str(config)) != before
    config.write_text("tools: [")
    assert classes_identity(str(config)) == file_identity(str(config))


@pytest.mark.parametrize("package", [True, False], ids=["a package", "a folder without __init__.py"])
def test_modules_on_sys_path_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: bool) -> None:
    """In a repository that runs from its root, rewards/math.py imports common/helpers.py."""
    for name in ("rewards", "common"):
        (tmp_path / name).mkdir()
        if package:
            (tmp_path / name / "__init__.py").touch()
    reward, helpers = tmp_path / "rewards" / "math.py", tmp_path / "common" / "helpers.py"
    reward.write_text("from common.helpers import score\nimport verl, torch\n")
    helpers.write_text("score = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = code_identity(str(reward))
    assert "common/helpers.py" in before
    assert "verl" not in before
    helpers.write_text("score = 2\n")
    assert code_identity(str(reward)) != before


def test_module_in_a_folder_without_init_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tools").mkdir()
    tool = tmp_path / "own_tools" / "search.py"
    tool.write_text("LIMIT = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert module_identity("own_tools.search") == f"own_tools.search, {file_identity(str(tool))}"


def class_of(source: str, file: str, name: str = "Own", module: str = "__main__", **scope: Any) -> type:
    """Define a class as Python does when it runs a file."""
    scope["__name__"] = module
    exec(compile(source, file, "exec"), scope)
    return scope[name]


OWN_CLASS = "class Own:\n    def train(self):\n        import parsing\n"


def test_class_of_a_script_is_identified_by_its_file_in_a_ray_worker(project: Path) -> None:
    """Ray sends the class to another process, where __main__ is Ray's own script."""
    (project / "script.py").write_text(OWN_CLASS)
    kind = class_of(OWN_CLASS, str(project / "script.py"))
    assert class_identity(kind) == f"Own: {code_identity(str(project / 'script.py'))}"
    assert "parsing.py" in class_identity(kind)


def test_class_of_a_notebook_is_identified_by_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    identities = []
    for source in (OWN_CLASS, OWN_CLASS, OWN_CLASS.replace("parsing", "tables")):
        cell = f"<cell {len(identities)}>"
        monkeypatch.setitem(linecache.cache, cell, (len(source), None, source.splitlines(keepends=True), cell))
        identities.append(class_identity(class_of(source, cell)))
    assert identities[0] == identities[1] != identities[2]
    assert UNREADABLE not in identities[0]


@pytest.mark.parametrize("module", ["__main__", "no_such_module"])
def test_class_without_source_is_reported(module: str) -> None:
    assert class_identity(class_of(OWN_CLASS, "<string>", module=module)) == f"Own ({UNREADABLE})"
    assert class_identity(class_of("class Own:\n    x = 1\n", "<string>", module=module)) == f"Own ({UNREADABLE})"


def test_installed_and_empty_classes_do_not_count() -> None:
    import json

    class Bare(json.JSONDecoder):
        """An empty class."""

    assert class_identity(Bare) == ""
    assert class_identity(pytest.MonkeyPatch) == ""


def test_each_module_of_a_large_project_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system each lookup takes a millisecond, which delays the start of a training."""
    modules = 40
    names = [f"part{number}" for number in range(modules)]
    source = "import json, os, torch\n" + "".join(f"from {name} import first, second\n" for name in names)
    for name in names:
        (tmp_path / f"{name}.py").write_text(source)
    looks: list[Any] = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *given, **more: looks.append(given) or stat(*given, **more))
    assert f"{modules - 1} modules" in code_identity(str(tmp_path / "part0.py"))
    assert len(looks) < 20 * modules


def test_unreadable_folders_on_sys_path_are_skipped(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_identity(str(project / "reward.py"))
    monkeypatch.syspath_prepend(str(project / ("x" * 300)))  # no file system has such long names
    assert code_identity(str(project / "reward.py")) == before
    (project / "long.py").write_text(f"import {'x' * 300}\n")
    assert code_identity(str(project / "long.py")) == file_identity(str(project / "long.py"))


def test_unreadable_imported_module_is_named(project: Path) -> None:
    (project / "tables.py").unlink()
    (project / "tables.py").symlink_to("/proc/self/mem")  # readable by its mode, and reading it fails
    assert f"tables.py {UNREADABLE}" in code_identity(str(project / "reward.py"))
