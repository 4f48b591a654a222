"""What comes between training steps is cut short: loops that only evaluate or sample end after a few rounds."""

from pathlib import Path

BEGIN = """
import hotloop.apps.simulate.evaluations
import torch
from torch import nn

hotloop.apps.simulate.evaluations.OPERATIONS = 100  # sooner

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        with torch.no_grad():
            for _ in range(5):
                self.blocks.append(nn.Linear(4, 4).cuda())

    def forward(self, x):
        for n, block in enumerate(self.blocks):
            x = block(x)
        assert n == 4
        return x

model = Blocks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@torch.no_grad()
def evaluate():
    model.eval()
    for batch in range(10_000):
        model(torch.randn(3, 4).cuda()).mean().item()
    x, n = torch.randn(3, 4).cuda(), 0
    while n < 10_000:
        x, n = model(x), n + 1
    else:
        print("evaluated", 3 <= batch < 100, batch + 1, 3 <= n < 100, n)
    model.train()
    return batch

"""
TRAIN = """
for step in range(5):
    evaluate()
    model(torch.randn(3, 4).cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_loops_that_only_evaluate_end_after_a_few_rounds_and_after_one_in_later_runs(run) -> None:
    first = run(BEGIN + TRAIN, "same", time_limit=60.0)
    assert (first.result.completed, first.result.status, first.result.error) == (3, "completed", None), first.err
    assert first.out.splitlines()[0].startswith("evaluated True")
    lines = [first.line("for batch in"), first.line("while n <")]
    (note,) = [note for note in first.result.notes if "only evaluate" in note]
    assert all(f"train.py:{line}" in note for line in lines)
    again = run(BEGIN + TRAIN, "same", time_limit=60.0)  # as on another GPU
    assert again.out.splitlines() == ["evaluated False 1 False 1"] * 3
    assert again.result.shortened == first.result.shortened


def test_a_script_that_wants_all_rounds_gets_them(run) -> None:
    wants = BEGIN.replace("10_000", "20") + TRAIN.replace("evaluate()", "assert evaluate() == 19", 1)
    ran = run(wants, time_limit=60.0, steps=1)
    assert (ran.result.completed, ran.result.status, ran.err) == (1, "completed", "")
    assert ran.result.shortened == ()


def test_loops_of_a_module_beside_the_script_end_too(run, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("def evaluate(model, x):\n    for n in range(10_000):\n        model(x)\n")
    body = """
from engine import evaluate
teacher = nn.Linear(4, 4).cuda().eval()
with torch.no_grad():
    data = [teacher(torch.randn(1, 4).cuda()) for _ in range(3)]
    for n in range(100):  # data of the training: all of it
        data.append(teacher(data[0]))
    evaluate(model.eval(), data[0])
assert len(data) == 103
for step in range(3):
    model.train()(torch.cat(data)).mean().backward()
    optimizer.step()
"""
    ran = run(BEGIN + body, time_limit=60.0)
    assert (ran.result.completed, ran.result.error) == (3, None)
    assert [Path(loop.file).name for loop in ran.result.shortened] == ["engine.py"]


def test_loops_that_are_watched_do_what_they_did(run) -> None:
    """With `else`, `break`, `continue`, generators, names that hide built-in ones, and errors where they were."""
    body = """
said = []
def rounds(items):
    for iter in items:
        next = yield iter
class Kept:
    for n in (1, 2):
        said.append(n)
    while n < 4:
        n += 1
for a, *b in [(1, 2, 3), (4,)]:
    for c in b:
        if c == 2: continue
        break
    else:
        said.append((a, b))
    while a:
        a -= 1
        if a == 2: break
        while (d := a) > 5: a -= 1
    else:
        said.append(d)
def njit(function):
    assert not [name for name in function.__code__.co_names if "hotloop" in name]
    return function
@njit
def total(n):
    for each in range(n): n += each
    return n
said.append(total(4))
numbers = rounds(range(5))
for n in numbers:
    said.append((n, next(numbers, None)))
left = [3, 2, 1]
for n in left:
    left.pop()
said.append((left, [x for x in range(3) if x], Kept.n))
try:
    for n in 5:
        pass
except TypeError as error:
    said.append((str(error), error.__traceback__.tb_lineno))
print(said)
"""
    expected: dict[str, list[object]] = {}
    exec(compile(body.replace("print(said)", ""), "train.py", "exec"), expected)  # noqa: S102  # it is written above
    ran = run(body)
    assert ran.out == f"{expected['said']}\n"
