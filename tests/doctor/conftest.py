"""Scripts that are looked at in this process."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from hotloop.apps.doctor.edits import SourceText, applied
from hotloop.apps.doctor.examined_script import ScriptRun, run
from hotloop.apps.doctor.looking import LOOK
from hotloop.apps.doctor.rules import RULES, Candidate, Script
from hotloop.apps.doctor.seen import SeenScript
from hotloop.scripts.exchange import Exchange


@dataclass
class Looked:
    """What a look at a script gave, and what the rules say of it."""

    seen: SeenScript
    text: str
    file: str

    def __post_init__(self) -> None:
        case = Script(self.file, self.seen, {self.file: SourceText(self.text)})
        self.found: dict[str, list[Candidate]] = {rule.name: list(rule.find(case)) for rule in RULES}

    @property
    def rules(self) -> set[str]:
        return {name for name, found in self.found.items() if found}

    def fixed(self, *rules: str) -> str:
        """The script with what these rules change."""
        found = [each for rule in rules for each in self.found[rule]]
        assert all(set(each.by_file) == {self.file} for each in found)
        return applied(self.text, [edit for each in found for edit in each.by_file[self.file]])


ScriptLook = Callable[[str], Looked]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, light_heap: None) -> Iterator[ScriptLook]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    precision = torch.get_float32_matmul_precision()

    def call(text: str) -> Looked:
        (tmp_path / "train.py").write_text(dedent(text))
        exchange = Exchange(tmp_path)
        exchange.ask(ScriptRun("train.py", (), False, seconds=0.0).to_json())
        run(exchange)
        # Workers that stay end at once, and not in a garbage collection, which waits five seconds for each.
        vars(sys.modules["__main__"]).clear()
        answer = exchange.answered
        assert answer.get("error") is None
        return Looked(SeenScript.from_json(answer[LOOK]), dedent(text), str((tmp_path / "train.py").resolve()))

    yield call
    torch.set_float32_matmul_precision(precision)
    torch.autograd.set_detect_anomaly(False)
    torch.set_grad_enabled(True)
