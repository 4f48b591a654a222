"""The batch of a script is set where a person says, without changing the script; samples of a step are counted."""

import ast
import keyword
import textwrap
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hotloop.apps.simulate.batch_setting import BatchSetting
from hotloop.errors import BadArgument

from .conftest import CARD

MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

model = nn.Linear(5, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(50, 5))


def step(x):
    optimizer.zero_grad()
    model(x.cuda()).sum().backward()
    optimizer.step()
    print(*x.shape)


"""
LOOP = "for _ in range(9):\n    step(torch.randn(batch, 5))\n"
EPOCHS = "for _ in range(9):\n    for (x,) in loader:\n        step(x)\n"

ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
train = parser.add_subparsers().add_parser("train")
train.add_argument("-b", dest="many", type=int, default=8)
batch = parser.parse_args().many
"""
CLICK = """
import click

@click.command()
@click.argument("command")
@click.option("--batch-size", default=8)
def main(command, batch_size):
    for _ in range(9):
        step(torch.randn(batch_size, 5))

main()
"""
TYPER = """
import typer

def main(command: str, batch_size: int = 8):
    for _ in range(9):
        step(torch.randn(batch_size, 5))

typer.run(main)
"""
PLACES = {
    "a subcommand and a short option": (ARGPARSE + LOOP, "argument:-b"),
    "click": (CLICK, "argument:--batch-size"),
    "typer": (TYPER, "argument:--batch-size"),
    "environment": ("import os\nbatch = int(os.environ.get('ROWS', 8))\n" + LOOP, "environment:ROWS"),
    "variable": ("N = 8\nbatch = N\n" + LOOP, "variable:N"),
    "attribute": ("class Config:\n    batch_size: int = 8\nbatch = Config.batch_size\n" + LOOP, "variable:batch_size"),
    "dictionary": ("config = {'batch_size': 8}\nbatch = config['batch_size']\n" + LOOP, "variable:batch_size"),
    "loader": ("loader = DataLoader(data, batch_size=8)\n" + EPOCHS, "variable:batch_size"),
}


def script(body: str) -> str:
    return MODEL.lstrip() + body


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_is_set_where_a_person_says(place: str, run) -> None:
    body, source = PLACES[place]
    after = run(script(body), "train", steps=2, batch=BatchSetting.parsed(source, 20))
    assert after.out == "20 5\n"  # the second step ends it
    assert (after.result.batch.size, after.result.batch.source, after.result.batch.samples) == (20, source, 20)
    assert after.result.error is None
    assert after.text == script(body)


def test_an_argument_that_is_given_is_replaced() -> None:
    batch = BatchSetting.parsed("argument:--micro", 8)
    assert batch.arguments(["--micro=2", "train", "--micro", "3", "--micros", "4"]) == (
        "train", "--micros", "4", "--micro", "8",
    )  # fmt: skip


def test_an_argument_that_the_script_does_not_have_ends_it(run) -> None:
    ran = run(script(ARGPARSE + LOOP), "train", batch=BatchSetting.parsed("argument:--rows", 8))
    assert ran.result.status == "failed"
    assert "unrecognized arguments: --rows 8" in ran.err


def test_a_variable_that_the_script_does_not_have_is_refused(run) -> None:
    with pytest.raises(BadArgument, match="gives no variable rows an integer") as caught:
        run(script(LOOP), batch=BatchSetting.parsed("variable:rows", 8))
    assert caught.value.fix


@pytest.mark.parametrize(
    "words", ["", "micro", "argument", "argument:", "loader:12", "colour:red", "variable:", "environment:"]
)
def test_what_points_nowhere_is_refused(words: str) -> None:
    with pytest.raises(BadArgument) as caught:
        BatchSetting.parsed(words, 8)
    assert caught.value.fix


NAMES = st.from_regex(r"[a-zé][a-z_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))


@given(NAMES, st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_script_with_another_batch_is_the_same_otherwise(name: str, own: int, asked: int) -> None:
    assume(name not in ("x", "other"))
    source = f"x, {name} = 4, {own}\nother = {name} + {own}\n"
    tree = ast.parse(source)
    assert BatchSetting("variable", name, asked).rewrite(tree) == 1
    assert ast.unparse(tree) == ast.unparse(ast.parse(source.replace(f"4, {own}", f"4, {asked}")))


def test_integers_are_found_wherever_they_are_given() -> None:
    tree = ast.parse("""
batch = other = 1
class Config:
    batch: int = 2
    def __init__(self, batch=3, *, x=0):
        self.batch = 4
def late(*, batch=5): pass
settings = dict(batch=6), {"batch": 7, "lr": 8}
batch, steps = "eight", 9
""")
    assert BatchSetting("variable", "batch", 64).rewrite(tree) == 7
    assert [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)].count(64) == 7


def test_evaluations_are_not_counted_and_accumulated_batches_are_one_step(run) -> None:
    body = """
loader, other = DataLoader(data, batch_size=4), DataLoader(data, batch_size=30)
for _ in range(9):
    for number, (x,) in enumerate(loader, start=1):
        model(x.cuda()).sum().backward()
        if number % 3 == 0:
            with torch.no_grad():
                list(other)
            optimizer.step()
            optimizer.zero_grad()
"""
    batch = run(script(body), steps=2).result.batch
    assert (batch.size, batch.source, batch.samples) == (None, "", 12)


def test_samples_of_a_stream_are_counted(run) -> None:
    body = """
class Stream(IterableDataset):
    def __iter__(self):
        return zip(torch.randn(50, 5))
loader = DataLoader(Stream(), batch_size=20)
"""
    assert run(script(body + EPOCHS), steps=3).result.batch.samples == 20  # 10 are left for the third step


def test_a_script_in_another_encoding(simulator, tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes(
        "# -*- coding: latin-1 -*-\nword = 'é'; batch = 8; assert (len(word), batch) == (1, 20)\n".encode("latin-1")
    )
    result = simulator.run(path, [], CARD, batch=BatchSetting("variable", "batch", 20))
    assert (result.error, result.batch.size) == (None, 20)


def test_a_silent_script_prints_nothing(run) -> None:
    body = "import os, sys\nbatch = 8\nprint('aloud', file=sys.stderr, flush=True)\nos.write(1, b'below')\n" + LOOP
    ran = run(script(textwrap.dedent(body)), steps=1, silent=True)
    assert (ran.out, ran.err, ran.result.completed) == ("", "", 1)
