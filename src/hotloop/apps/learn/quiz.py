"""The quiz: questions as data, judged by choice, by what a line of code does, or by what it says."""

import ast
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hotloop.errors import BadArgument

FILE = Path(__file__).with_name("quiz.toml")
LETTERS = "abcdef"


@dataclass(frozen=True)
class Question:
    """A question; `choices` and the letter of the right one, or the name of the judge of a line of code."""

    key: str
    lesson: int
    text: str
    answer: str  # the right letter, or a line of code that is right
    why: str
    choices: tuple[str, ...] = ()
    judge: str = ""

    def is_right(self, given: str) -> bool:
        """Whether an answer is right; anything may be given."""
        if not self.judge:
            return given.strip().lower().rstrip(").") == self.answer
        return JUDGES[self.judge](given.strip().strip("`"))


@cache
def questions() -> tuple[Question, ...]:
    """All questions in their order."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Question(key, each["lesson"], each["text"], each["answer"], each["why"], tuple(each.get("choices", ())),
                 each.get("judge", ""))
        for key, each in data.items()
    )  # fmt: skip


def about(lesson: int | None) -> tuple[Question, ...]:
    """The questions about one lesson, or all."""
    chosen = tuple(each for each in questions() if lesson in (None, each.lesson))
    if not chosen:
        have = ", ".join(map(str, sorted({each.lesson for each in questions()})))
        raise BadArgument(f"there is no question about lesson {lesson}", fix=f"choose one of {have}")
    return chosen


def _tree(line: str) -> ast.Module | None:
    """One statement of no loops and no definitions, or nothing."""
    try:
        tree = ast.parse(line)
    except (SyntaxError, ValueError):
        return None
    plain = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.With
    return tree if len(tree.body) == 1 and isinstance(tree.body[0], plain) else None


class _Cuda:
    """`torch` as a machine with or without a GPU has it; enough of it for a line that chooses a device."""

    def __init__(self, there: bool) -> None:
        kind = "cuda" if there else "cpu"
        self.cuda = SimpleNamespace(is_available=lambda: there, device_count=lambda: int(there))
        self.accelerator = SimpleNamespace(
            is_available=lambda: there, current_accelerator=lambda **_: self.device("cuda") if there else None
        )
        self.pick = lambda *_, **__: SimpleNamespace(device=self.device(kind))

    @staticmethod
    def device(name: Any) -> Any:
        return SimpleNamespace(type=str(getattr(name, "type", name)).split(":")[0])


def _chooses_a_device(line: str) -> bool:
    """A line that takes the GPU where there is one, and else the CPU: it is run for both."""
    tree = _tree(line)
    if tree is None or not isinstance(tree.body[0], ast.Assign):
        return False
    chosen = []
    for there in (True, False):
        torch = _Cuda(there)
        names: dict[str, Any] = {"torch": torch, "hotloop": torch, "__builtins__": {}}
        try:
            exec(compile(tree, "<answer>", "exec"), names)  # noqa: S102  # one assignment, with no builtins
        except Exception:  # noqa: BLE001  # whatever it is, it chooses nothing
            return False
        value = names.get("device")
        chosen.append(getattr(value, "type", str(value).split(":")[0]))
    return chosen == ["cuda", "cpu"]


def _calls(line: str) -> list[ast.Call]:
    tree = _tree(line)
    return [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _moves_the_batch(line: str) -> bool:
    """`x = x.to(device)`, or what says the same: the result must be kept."""
    tree = _tree(line)
    if tree is None or not isinstance(tree.body[0], ast.Assign):
        return False
    target = ast.unparse(tree.body[0].targets[0])
    moved = {f"{target} = {target}.to(device)", f"{target} = hotloop.move({target}, device)"}
    return target == "x" and ast.unparse(tree).replace(", non_blocking=True", "") in moved


def _makes_it_there(line: str) -> bool:
    """A tensor made on the device, and not moved to it."""
    makers = {"torch.zeros", "torch.empty", "torch.full", "torch.ones", "torch.rand", "torch.randn"}
    return any(
        ast.unparse(call.func) in makers and any(word.arg == "device" for word in call.keywords)
        for call in _calls(line)
    ) and ".to(" not in line  # fmt: skip


def _adds_without_the_graph(line: str) -> bool:
    """`total += loss.detach()` or `.item()`."""
    tree = _tree(line)
    if tree is None or not isinstance(tree.body[0], ast.AugAssign | ast.Assign):
        return False
    return "total" in line and any(word in line.replace(" ", "") for word in ("loss.detach()", "loss.item()"))


def _moves_without_blocking(line: str) -> bool:
    """`x.to(device, non_blocking=True)`, kept."""
    return "non_blocking=True" in line.replace(" ", "") and _moves_the_batch(line)


def _turns_gradients_off(line: str) -> bool:
    """`with torch.inference_mode():` or `no_grad`, with or without a body."""
    text = line if not line.rstrip().endswith(":") else f"{line} pass"
    tree = _tree(text)
    if tree is None or not isinstance(tree.body[0], ast.With):
        return False
    return ast.unparse(tree.body[0].items[0].context_expr) in ("torch.inference_mode()", "torch.no_grad()")


JUDGES: dict[str, Callable[[str], bool]] = {
    "device": _chooses_a_device,
    "move": _moves_the_batch,
    "make": _makes_it_there,
    "detach": _adds_without_the_graph,
    "non_blocking": _moves_without_blocking,
    "no_grad": _turns_gradients_off,
}
