"""What the text of a script shows of its batch: names, places, and a text with another batch in it."""

import ast
import keyword

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hotloop.apps.simulate.ways import Way, batch_variables, look, rank, rewritten, value_of
from hotloop.errors import BadArgument

NAMES = st.from_regex(r"[a-zé][a-z_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))


@pytest.mark.parametrize(
    "name", ["batch", "--batch-size", "BATCH_SIZE", "batchsize", "batchSize", "bs", "--bs", "BSZ", "Batch"]
)
def test_names_that_surely_mean_the_batch(name: str) -> None:
    assert rank(name) == 0


@pytest.mark.parametrize(
    "name",
    [
        "train_batch_size",
        "--per_device_train_batch_size",
        "MICRO_BATCH",
        "mini_batch_size",
        "minibatch",
        "batch_size_train",
    ],
)
def test_names_that_likely_do(name: str) -> None:
    assert rank(name) == 1


@pytest.mark.parametrize(
    "name",
    ["batches", "n_batches", "test_batch_size", "val_bs", "eval-batch-size", "batch_norm", "batch_first", "b", "abs"],
)
def test_names_that_do_not(name: str) -> None:
    assert rank(name) is None


def test_integers_are_found_wherever_they_are_given() -> None:
    seen = look(
        """
BATCH_SIZE = 64
width, bs = 4, 8
class Config:
    train_batch: int = 16
    def __init__(self, minibatch=2, *, batchsize=3):
        self.micro_batch = 5
settings = {"batch": 7, "lr": 0.1}
steps = batch_size = 9
count = 0
flag = True
"""
    )
    owns = {name: [spot.value for spot in spots] for name, spots in seen.variables.items()}
    assert owns == {
        "BATCH_SIZE": [64], "width": [4], "bs": [8], "train_batch": [16], "minibatch": [2], "batchsize": [3],
        "micro_batch": [5], "batch": [7], "steps": [9], "batch_size": [9],
    }  # fmt: skip


def test_the_surest_names_come_first_and_values_must_agree() -> None:
    seen = look("train_batch_size = 4\nbatch = 8\ndef main():\n    batch = 8\ndef test():\n    bs = 3\n    bs = 5\n")
    assert batch_variables(seen) == ["batch", "bs"]
    assert (value_of(seen, "batch"), value_of(seen, "bs"), value_of(seen, "absent")) == (8, None, None)
    assert batch_variables(look("micro_batch = 4")) == ["micro_batch"]
    assert batch_variables(look("width = 4")) == []


def test_options_packages_and_the_environment_are_seen() -> None:
    seen = look(
        "import os, click\nb = int(os.environ.get('BATCH', 8))\nc = os.environ['TRAIN_BS']\nos.getenv('HOME')\n"
    )
    assert (seen.environment, seen.parsers, seen.options) == ({"BATCH": 8, "TRAIN_BS": None}, ("click",), False)
    assert look("p.add_argument('--batch-size')").options
    assert not look("p.add_argument('--test-batch-size')").options
    assert look("from typer import Typer").parsers == ("typer",)


def test_what_python_cannot_read_shows_nothing() -> None:
    assert look("batch = = 8") == look("\0") == look("")


@given(NAMES, st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(["", "é = 'ü'; ", "\tx = 1; "]))
def test_a_script_with_another_batch_is_the_same_otherwise(name: str, own: int, asked: int, before: str) -> None:
    before = before.strip()
    assume(not before.startswith(f"{name} ="))  # then it is the second of two, and a text knows only the first
    source = f"# é\x0c\n\n{before}{' ' * bool(before)}{name} = {own}  # ü\nother = {name} + {own}\n"
    changed = rewritten(source, look(source).variables[name], asked)
    assert changed == source.replace(f"{name} = {own}", f"{name} = {asked}", 1)
    names: dict[str, int] = {}
    exec(compile(ast.parse(changed), "script", "exec"), names)  # noqa: S102
    assert names["other"] == asked + own


def test_several_places_on_one_line_are_all_set() -> None:
    source = "batch = 8; x = 1; batch = 8\n"
    assert rewritten(source, look(source).variables["batch"], 100) == "batch = 100; x = 1; batch = 100\n"


def test_a_place_is_pointed_at() -> None:
    assert Way.parsed("loader") == Way("loader", "")
    assert Way.parsed("loader:12") == Way("loader", "12")
    assert Way.parsed("variable:N") == Way("variable", "N")


@pytest.mark.parametrize(
    "words", ["", "micro", "argument", "argument:", "loader:", "loader:x", "colour:red", "variable:"]
)
def test_what_points_nowhere_is_refused(words: str) -> None:
    with pytest.raises(BadArgument) as caught:
        Way.parsed(words)
    assert caught.value.fix
