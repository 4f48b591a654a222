"""Each application's folder can be deleted: the rest works, and what is missing says what to do."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hotloop

from .thorough import some

ROOT = Path(hotloop.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERBS: dict[str, str] = PROJECT["entry-points"]["hotloop.verbs"]
APPLICATIONS = sorted(path.name for path in (ROOT / "src/hotloop/apps").iterdir() if (path / "__init__.py").exists())


@pytest.mark.parametrize("name", some(APPLICATIONS, ["simulate"]))
def test_without_an_application_the_rest_works(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "src/hotloop/apps" / name)
    gone = f"hotloop.apps.{name}"
    with_it = [verb for verb, place in VERBS.items() if place.startswith(f"{gone}.")]
    names = {"leaks": ["watch_growth"], "simulate": ["simulate"]}.get(name, [])
    assert with_it or names

    def python(*args: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *args]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)

    listed = python("-m", "hotloop", "--help").stdout
    lines = [line.strip("│ ").split() for line in listed.splitlines()]
    shown = {words[0] for words in lines if words}
    assert {"device", "profile"} <= shown
    assert shown & set(VERBS) == set(VERBS) - set(with_it)
    for verb in with_it:
        done = python("-m", "hotloop", verb, "train.py", "--help")
        assert done.returncode == 2
        assert f"`hotloop {verb}` is not here: {gone}" in done.stderr
        assert "fix: pip install" in done.stderr
    others = """
import hotloop, importlib, pkgutil
for name in hotloop.__all__:
    try: getattr(hotloop, name)
    except hotloop.HotloopError as error: print(name, error)
for found in pkgutil.walk_packages(hotloop.__path__, "hotloop."):
    if not found.name.startswith("hotloop.apps") and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""
    done = python("-c", others)
    assert done.returncode == 0, done.stderr
    missing = [line for line in done.stdout.splitlines() if line and not line.startswith("  fix: pip install")]
    assert missing == [f"{each} hotloop.{each} is not here: {gone} is not installed" for each in names]
    zoo = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/zoo/test_same_training.py", "-k", "plain_plan_is"
    )
    assert zoo.returncode == 0, zoo.stdout
