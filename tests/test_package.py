"""The package as a whole: nothing happens at import, and the public names are there."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import hotloop

from .warm import Warm


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_lazy() -> None:
    assert run("import hotloop, sys; print('torch' in sys.modules)") == "False\n"


def test_imports_start_no_gpu_set_nothing_and_draw_no_random_numbers() -> None:
    code = """
import random
random.seed(0)
before = random.getstate()
import os, torch
def settings():
    return dict(os.environ), torch.get_default_dtype(), torch.backends.cudnn.benchmark, torch.get_num_threads()
set_before = settings()
import hotloop
import hotloop.memory
from hotloop import Loop
for name in hotloop.__all__: getattr(hotloop, name)
import hotloop.run.display, hotloop.report.runs, hotloop.apps.top.view, hotloop.apps.simulate.shown
print(set_before == settings(), torch.cuda.is_initialized(), random.getstate() == before)
"""
    assert run(code) == "True False True\n"


TRAINING = """
import random, sys
random.seed(0)
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

numpy.random.seed(0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
loader = DataLoader(data, 4, shuffle=True)
HERE
print(random.random(), numpy.random.rand(), torch.rand(3).tolist(), [p.tolist() for p in model.parameters()])
"""
BY_HAND = """
for _ in range(2):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
BY_HOTLOOP = """
import hotloop, warnings
loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain")
report = loop.fit(loader, epochs=2, progress={progress}, save={save!r})
hotloop.pick(), hotloop.usage("cpu"), str(report), report.to_json()
"""


def test_a_program_draws_the_same_random_numbers_with_and_without_hotloop(tmp_path: Path, warm: Warm) -> None:
    def last_line(training: str) -> str:
        script = tmp_path / "train.py"
        script.write_text(TRAINING.replace("HERE", training))
        ran = warm.run(script, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()[-1]

    ours = [
        BY_HOTLOOP.format(progress=progress, save=save)
        for progress, save in ((True, str(tmp_path / "run")), (False, None))
    ]
    by_hand, *hot = map(last_line, (BY_HAND, *ours))
    assert hot == [by_hand, by_hand]


def test_type_checkers_and_editors_see_every_public_name() -> None:
    block = next(
        node
        for node in ast.parse(Path(hotloop.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    homes = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    declared = {node.target.id for node in block.body if isinstance(node, ast.AnnAssign)}
    names = {name for name in homes if name is not None}

    assert names | declared | {"__version__"} == set(hotloop.__all__) <= set(dir(hotloop))
    for name in names - {"metrics", "waits"}:
        assert homes[name] == f"hotloop.{hotloop._HOMES[name]}"


def test_git_ignores_no_file_of_the_package() -> None:
    root = Path(hotloop.__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a clone")
    listed = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "src"]
    ignored = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    caches = {"__pycache__", ".ruff_cache", ".mypy_cache"}
    # neither a clone nor `pip install .` has what .gitignore names
    assert [file for file in ignored if caches.isdisjoint(Path(file).parts)] == []


def test_the_version_stands_in_one_place_and_leads_the_changelog() -> None:
    root = Path(hotloop.__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/hotloop/version.py"
    versions = re.findall(r"^## (\S+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == hotloop.__version__
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)


def test_a_wheel_holds_the_package_with_its_data_and_nothing_else() -> None:
    source = Path(hotloop.__file__).parent
    project = tomllib.loads((source.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    # hatchling puts everything below these folders into a wheel, but for what git ignores (see the test above)
    assert project["tool"]["hatch"]["build"] == {"targets": {"wheel": {"packages": ["src/hotloop"]}}}
    assert (source / "py.typed").is_file(), "type checkers look for it"
    assert not [file for file in source.rglob("*.py") if file.name.startswith("test_") or file.name == "conftest.py"]


def test_a_name_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(AttributeError, match="golden_rule"):
        hotloop.golden_rulle  # noqa: B018


def test_no_two_classes_have_one_name() -> None:
    source = Path(hotloop.__file__).parent
    files = defaultdict(list)
    exercises = source / "apps" / "learn" / "exercises"  # scripts for learners, each of which stands alone
    for file in sorted(set(source.rglob("*.py")) - set(exercises.glob("*.py"))):
        for name in re.findall(r"^ *class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            files[name].append(str(file.relative_to(source)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_no_two_files_have_one_name() -> None:
    """But those that play one part in every place: what a folder says of itself, its base, its door to PyTorch."""
    source = Path(hotloop.__file__).parent
    exercises = source / "apps" / "learn" / "exercises"
    alike = {"__init__.py", "__main__.py", "base.py", "_torch.py"}
    names = Counter(file.name for file in set(source.rglob("*.py")) - set(exercises.glob("*.py")))
    assert [name for name, times in names.items() if times > 1 and name not in alike] == []


def test_constants_say_what_they_limit() -> None:
    """A name in more than three files says too little; `FAMILY` is what every family of the simulator has."""
    source = Path(hotloop.__file__).parent
    files = defaultdict(set)
    for file in source.rglob("*.py"):
        for name in re.findall(r"^([A-Z][A-Z_]{2,}) *[:=]", file.read_text(encoding="utf-8"), re.MULTILINE):
            files[name].add(str(file.relative_to(source)))
    assert {name: found for name, found in files.items() if len(found) > 3 and name != "FAMILY"} == {}
