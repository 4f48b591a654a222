"""Each application's folder can be deleted: the rest works, and what is missing says what to do."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import hotloop

from .thorough import THOROUGH, some
from .warm import Warm

ROOT = Path(hotloop.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERBS: dict[str, str] = PROJECT["entry-points"]["hotloop.verbs"]
APPLICATIONS = sorted(path.name for path in (ROOT / "src/hotloop/apps").iterdir() if (path / "__init__.py").exists())
TRAININGS = "" if THOROUGH else " and (plain_mlp or gan or cnn_with_batchnorm or diffusion_transformer)"
# In a process that has torch, and has hotloop from where it is whole: forget that, and be `python -m MODULE`.
MODULE = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "hotloop"]:
    del sys.modules[name]
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
OTHERS = """
import hotloop, importlib, pkgutil
print(hotloop.__file__)
for name in hotloop.__all__:
    try: getattr(hotloop, name)
    except hotloop.HotloopError as error: print(name, error)
for found in pkgutil.walk_packages(hotloop.__path__, "hotloop."):
    if not found.name.startswith("hotloop.apps") and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""


@pytest.mark.parametrize("name", some(APPLICATIONS, ["simulate"]))
def test_without_an_application_the_rest_works(name: str, tmp_path: Path, warm: Warm) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.rmtree(tmp_path / "src/hotloop/apps" / name)
    for script, text in {"module.py": MODULE, "others.py": OTHERS}.items():
        (tmp_path / "src" / script).write_text(text)
    gone = f"hotloop.apps.{name}"
    with_it = [verb for verb, place in VERBS.items() if place.startswith(f"{gone}.")]
    names = {"leaks": ["watch_growth"], "simulate": ["simulate"]}.get(name, [])
    assert with_it or names

    def python(*args: str) -> subprocess.CompletedProcess[str]:
        return warm.run(tmp_path / "src/module.py", *args, cwd=ROOT)

    listed = python("hotloop", "--help").stdout
    lines = [line.strip("│ ").split() for line in listed.splitlines()]
    shown = {words[0] for words in lines if words}
    assert {"device", "profile"} <= shown
    assert shown & set(VERBS) == set(VERBS) - set(with_it)
    for verb in with_it:
        done = python("hotloop", verb, "train.py", "--help")
        assert done.returncode == 2
        assert f"`hotloop {verb}` is not here: {gone}" in done.stderr
        assert "fix: pip install" in done.stderr
    done = python("others")
    assert done.returncode == 0, done.stderr
    where, *missing = [line for line in done.stdout.splitlines() if line and not line.startswith("  fix: pip install")]
    assert Path(where).is_relative_to(tmp_path)
    assert missing == [f"{each} hotloop.{each} is not here: {gone} is not installed" for each in names]
    zoo = "tests/zoo/test_same_training.py"
    done = python("pytest", "-q", "-p", "no:cacheprovider", zoo, "-k", f"plain_plan_is{TRAININGS}")
    assert done.returncode == 0, done.stdout
