"""The batch of a script: found where people write it, set without changing the script, and full."""

import textwrap
from pathlib import Path

import pytest

from ..thorough import THOROUGH, some
from .conftest import CARD

MODEL = """
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

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
parser.add_argument("--batch-size", "-b", type=int, default=8)
parser.add_argument("--test-batch-size", type=int, default=1000)
batch = parser.parse_args().batch_size
"""
COMMANDS = """
import argparse
parser = argparse.ArgumentParser()
train = parser.add_subparsers().add_parser("train")
train.add_argument("-b", dest="many", default="8", help="size of a batch")
batch = int(parser.parse_args(["train"]).many)
"""
CLICK = """
import click

@click.command()
@click.option("--epochs", default=1)
@click.option("--batch-size", default=8)
def main(epochs, batch_size):
    for _ in range(9):
        step(torch.randn(batch_size, 5))

main()
"""
TYPER = """
import typer

def main(epochs: int = 1, batch_size: int = 8):
    for _ in range(9):
        step(torch.randn(batch_size, 5))

typer.run(main)
"""
PLACES = {
    "argparse": (ARGPARSE + LOOP, "argument:--batch-size"),
    "a subcommand and a short option": (COMMANDS + LOOP, "argument:-b"),
    "click": (CLICK, "argument:--batch-size"),
    "typer": (TYPER, "argument:--batch-size"),
    "environment": ("import os\nbatch = int(os.environ.get('BATCH_SIZE', 8))\n" + LOOP, "environment:BATCH_SIZE"),
    "variable": ("BATCH = 8\nbatch = BATCH\n" + LOOP, "variable:BATCH"),
    "attribute": ("class Config:\n    batch_size: int = 8\nbatch = Config.batch_size\n" + LOOP, "variable:batch_size"),
    "dictionary": ("config = {'batch_size': 8}\nbatch = config['batch_size']\n" + LOOP, "variable:batch_size"),
    "in main": (
        "def main():\n    batch_size = 8\n    for _ in range(9):\n        step(torch.randn(batch_size, 5))\nmain()\n",
        "variable:batch_size",
    ),
    "option before variable": ("BATCH = 3\n" + ARGPARSE + LOOP, "argument:--batch-size"),
    "variable of a loader": ("bs = 8\nloader = DataLoader(data, batch_size=bs)\n" + EPOCHS, "variable:bs"),
    "loader": ("loader = DataLoader(data, batch_size=8)\n" + EPOCHS, "loader:17"),
    "loader beside a variable": ("bs = 4\nloader = DataLoader(data, batch_size=8)\n" + EPOCHS, "loader:18"),
    "batch sampler": (
        "loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 8, False))\n" + EPOCHS,
        "loader:17",
    ),
}


def script(body: str) -> str:
    return MODEL.lstrip() + body


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_is_found_and_set_wherever_people_write_it(place: str, run) -> None:
    body, source = PLACES[place]
    after = run(script(body), steps=2, batch=20)
    assert after.out == "20 5\n"  # the second step ends it
    assert (after.result.batch.size, after.result.batch.source, after.result.batch.samples) == (20, source, 20)
    assert after.result.error is None
    assert any(note.startswith("the batch is 20, set through ") for note in after.result.notes)
    assert after.text == script(body)


@pytest.mark.parametrize("place", some(PLACES, ["argparse", "typer", *list(PLACES)[4::2]]))
def test_a_batch_that_is_not_set_is_found_too(place: str, run) -> None:
    ran = run(script(PLACES[place][0]), steps=2)
    assert ran.result.error is None
    assert (ran.result.batch.size, ran.result.batch.samples) == ((4 if "beside" in place else 8), 8)


def test_loaders_that_nothing_learns_from_stay_as_they_are(run) -> None:
    body = """
loader, other = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=30)
for (x,) in loader:
    step(x)
    with torch.no_grad():
        print("evaluated", [len(x) for x, in other])
"""
    ran = run(script(body), steps=2, batch=20)
    assert ran.out == "20 5\nevaluated [30, 20]\n"


@pytest.mark.parametrize(("batch", "drop_last"), [(40, False), (40, True), (51, True), (500, False)])
def test_batches_are_full_however_few_items_there_are(batch: int, drop_last: bool, run) -> None:
    body = f"loader = DataLoader(data, batch_size=8, shuffle=True, drop_last={drop_last})\n" + EPOCHS
    ran = run(script(body), steps=4, batch=batch)
    assert ran.out == f"{batch} 5\n" * 3
    assert ran.result.completed == 4
    assert ran.result.batch.items == (50 if batch > 50 else None)
    assert any("the data has 50 items" in note for note in ran.result.notes) == (batch > 50)


def test_data_that_nothing_learns_from_ends_as_it_would(run) -> None:
    body = """
loader = DataLoader(data, batch_size=8)
print("mean over", sum(len(x) for x, in loader))
for (x,) in DataLoader(TensorDataset(torch.randn(0, 5)), batch_size=8, drop_last=True):
    print("never")
"""
    ran = run(script(body) + EPOCHS, steps=2, batch=20)
    assert ran.out == "mean over 50\n20 5\n"


def test_accumulated_batches_are_one_step(run) -> None:
    body = """
loader = DataLoader(data, batch_size=4)
for _ in range(9):
    for number, (x,) in enumerate(loader, start=1):
        model(x.cuda()).sum().backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
    assert run(script(body), steps=2).result.batch.samples == 12
    assert run(script(body), steps=2, batch=30).result.batch.samples == 90


def test_a_stream_that_ends_gives_what_it_has(run) -> None:
    body = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(50, 5))
loader = DataLoader(Stream(), batch_size=8)
for _ in range(9):
    for x in loader:
        step(x)
"""
    ran = run(script(body), steps=2, batch=70)
    assert (ran.out, ran.result.batch.samples) == ("50 5\n", 50)


CLASHES = {
    "variables": ("batch_size, bs = 8, 4\nbatch = batch_size\n" + LOOP, "batch_size and bs disagree"),
    "values": ("batch_size = 8\nbatch_size = 4\nbatch = batch_size\n" + LOOP, "batch_size is given several values"),
    "options": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--batch', type=int, default=8)\n"
        "parser.add_argument('--bs', type=int, default=2)\nbatch = parser.parse_args().batch\n" + LOOP,
        "--batch and --bs disagree",
    ),
    "loaders": (
        "few = DataLoader(data, batch_size=8)\nmany = DataLoader(data, batch_size=25)\n"
        "for _ in range(9):\n    for (x,), (y,) in zip(few, many):\n        step(torch.cat([x, y]))\n",
        "the loaders of lines 17 and 18 disagree",
    ),
    "nothing": ("batch = len('12345678')\n" + LOOP, ""),
}


@pytest.mark.parametrize("clash", CLASHES)
def test_where_it_is_not_clear_nothing_is_claimed(clash: str, run) -> None:
    body, words = CLASHES[clash]
    for batch in (None, 20) if THOROUGH or clash in ("variables", "loaders") else (20,):
        found = run(script(body), steps=1, batch=batch).result.batch
        assert (found.size, found.source, found.clash) == (None, "", words)


@pytest.mark.parametrize(
    ("body", "way"),
    [
        (CLASHES["variables"][0], "variable:batch_size"),
        (CLASHES["options"][0], "argument:--batch"),
        ("N = 8\nbatch = N\n" + LOOP, "variable:N"),
        (ARGPARSE.replace("--batch-size", "--micro").replace("batch_size", "micro") + LOOP, "argument:--micro"),
        ("import os\nbatch = int(os.environ.get('ROWS', 8))\n" + LOOP, "environment:ROWS"),
    ],
)
def test_a_place_that_is_pointed_at_is_the_one(body: str, way: str, run) -> None:
    ran = run(script(body), steps=2, batch=20, batch_from=way)
    assert (ran.out, ran.result.batch.source) == ("20 5\n", way)


def test_a_loader_is_pointed_at_by_its_line(run) -> None:
    body = CLASHES["loaders"][0]
    assert run(script(body), steps=2, batch=20, batch_from="loader:17").out == "45 5\n"
    assert run(script(body), steps=2, batch=20, batch_from="loader:18").out == "28 5\n"


def test_a_place_that_is_not_there_is_not_found(run) -> None:
    for way in ("argument:--micro", "variable:N", "loader:3"):
        found = run(script("batch = 8\n" + LOOP), steps=1, batch=20, batch_from=way).result.batch
        assert (found.size, found.source) == (None, "")


def test_a_script_in_another_encoding(simulator, tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes(
        "# -*- coding: latin-1 -*-\nword = 'é'; batch = 8; assert (len(word), batch) == (1, 20)\n".encode("latin-1")
    )
    result = simulator.run(path, [], CARD, batch=20)
    assert (result.error, result.batch.size) == (None, 20)


def test_a_silent_script_prints_nothing(run) -> None:
    body = "import os, sys\nbatch = 8\nprint('aloud', file=sys.stderr, flush=True)\nos.write(1, b'below')\n" + LOOP
    ran = run(script(textwrap.dedent(body)), steps=1, silent=True)
    assert (ran.out, ran.err, ran.result.completed) == ("", "", 1)
