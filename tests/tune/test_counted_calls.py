"""Wherever an objective counts its calls, a run of the default plan counts as a loop by hand does."""

import ctypes
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import PlanWarning

BATCHES = 110  # for which a plan is worth looking for
CALLS: ContextVar[int] = ContextVar("CALLS", default=0)
MODULE = "calls, table, log = 0, {}, []\n\ndef count():\n    global calls\n    calls += 1\n"


class Tally:
    total = 0
    seen: list[int] = []  # noqa: RUF012

    @classmethod
    def count(cls) -> None:
        cls.total += 1


@dataclass
class Pair:
    """A batch with attributes of its own."""

    x: Tensor
    y: Tensor
    calls: int = 0
    log: list[int] = field(default_factory=list)


class Slotted:
    __slots__ = ("calls", "x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.calls = x, y, 0


Count = Callable[[nn.Module, Any], object]
Place = tuple[Count, Callable[[list[Any]], int]]  # counts a call; reads the count, from the batches too


def _add(table: Any, key: Any) -> None:
    table[key] += 1


def _kept_in(table: Any, key: Any) -> Place:
    return lambda model, batch: _add(table, key), lambda batches: int(table[key])


def in_a_bytearray() -> Place:
    return _kept_in(bytearray(4), 1)


def in_a_large_array() -> Place:
    return _kept_in(np.zeros(200_000), 777)


def in_an_array_of_objects() -> Place:
    return _kept_in(np.array([0, None], object), 0)


def in_a_long_list() -> Place:
    return _kept_in([0] * 5000, 2500)


def in_a_long_dict() -> Place:
    return _kept_in(dict.fromkeys(range(5000), 0), 2500)


def in_a_number_of_numpy() -> Place:
    table = {"calls": np.float32(0)}
    return _kept_in(table, "calls")


def in_memory_of_c() -> Place:
    number = ctypes.c_int(0)

    def count(model: nn.Module, batch: Any) -> None:
        number.value += 1

    return count, lambda batches: number.value


def in_a_bytearray_of_the_model() -> Place:
    models = []

    def count(model: Any, batch: Any) -> None:
        models[:] = [model]
        model.calls = getattr(model, "calls", bytearray(1))
        model.calls[0] += 1

    return count, lambda batches: models[0].calls[0]


def in_a_file(folder: Path) -> Place:
    file = (folder / "log.txt").open("w")

    def read(batches: list[Any]) -> int:
        file.close()
        return len((folder / "log.txt").read_text())

    return lambda model, batch: file.write("x"), read


def in_the_environment() -> Place:
    os.environ["HOTLOOP_TEST_CALLS"] = "0"

    def count(model: nn.Module, batch: Any) -> None:
        os.environ["HOTLOOP_TEST_CALLS"] = str(int(os.environ["HOTLOOP_TEST_CALLS"]) + 1)

    return count, lambda batches: int(os.environ["HOTLOOP_TEST_CALLS"])


def in_a_context_variable() -> Place:
    CALLS.set(0)
    return lambda model, batch: CALLS.set(CALLS.get() + 1), lambda batches: CALLS.get()


def in_a_class() -> Place:
    before = len(Tally.seen)
    return lambda model, batch: Tally.seen.append(1), lambda batches: len(Tally.seen) - before


def in_a_method_of_a_class() -> Place:
    before = Tally.total
    return lambda model, batch: Tally.count(), lambda batches: Tally.total - before


def _module() -> Any:
    return sys.modules["counted_for_a_test"]


def in_a_module_that_is_imported_inside() -> Place:
    def count(model: nn.Module, batch: Any) -> None:
        import counted_for_a_test  # type: ignore[import-not-found]

        counted_for_a_test.calls += 1

    return count, lambda batches: _module().calls


def in_what_a_module_holds() -> Place:
    def count(model: nn.Module, batch: Any) -> None:
        from counted_for_a_test import table

        table["calls"] = table.get("calls", 0) + 1

    return count, lambda batches: _module().table["calls"]


def in_a_function_of_a_module() -> Place:
    def count(model: nn.Module, batch: Any) -> None:
        import counted_for_a_test

        counted_for_a_test.count()

    return count, lambda batches: _module().calls


def in_a_module_by_its_name() -> Place:
    def count(model: nn.Module, batch: Any) -> None:
        sys.modules["counted_for_a_test"].log.append(1)

    return count, lambda batches: len(_module().log)


def in_the_batch() -> Place:
    return lambda model, batch: setattr(batch, "calls", batch.calls + 1), lambda batches: sum(b.calls for b in batches)


def in_a_list_of_the_batch() -> Place:
    return lambda model, batch: batch.log.append(1), lambda batches: sum(len(b.log) for b in batches)


PLACES = [
    *(in_a_bytearray, in_a_large_array, in_an_array_of_objects, in_a_long_list, in_a_long_dict),
    *(in_a_number_of_numpy, in_memory_of_c, in_a_bytearray_of_the_model, in_a_file, in_the_environment),
    *(in_a_context_variable, in_a_class, in_a_method_of_a_class, in_a_module_that_is_imported_inside),
    *(in_what_a_module_holds, in_a_function_of_a_module, in_a_module_by_its_name, in_the_batch, in_a_list_of_the_batch),
]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted_for_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "counted_for_a_test", raising=False)
    __import__("counted_for_a_test")
    monkeypatch.setenv("HOTLOOP_TEST_CALLS", "0")


def batches_of(kind: type) -> list[Any]:
    x = torch.linspace(0, 1, BATCHES * 4 * 8).view(BATCHES, 4, 8)
    return [kind(part, part.sum(1, keepdim=True)) for part in x]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("place", "kind"), [*((place, Pair) for place in PLACES), (in_the_batch, Slotted)])
def test_a_default_run_counts_each_step_once(place: Callable[..., Place], kind: type, tmp_path: Path) -> None:
    count, read = place(tmp_path) if place is in_a_file else place()

    def objective(model: nn.Module, batch: Any) -> Tensor:
        count(model, batch)
        return nn.functional.mse_loss(model(batch.x), batch.y)

    torch.manual_seed(0)
    model, batches = nn.Linear(8, 1), batches_of(kind)
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), objective=objective, device="cpu")
    loop.fit(batches, progress=False)
    assert read(batches) == BATCHES


def test_what_an_objective_only_reads_is_no_obstacle() -> None:
    """Generators that are restored, modules and settings that stay: the plan is that of any other run."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        import random

        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: S311
        scale = float(os.environ.get("HOTLOOP_TEST_SCALE", "1")) + len(sys.modules) * 0 + CALLS.get() * 0
        return nn.functional.mse_loss(model(batch.x), batch.y) * (1 + 1e-3 * noise * scale)

    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), objective=objective, device="cpu")
    loop.fit(batches_of(Pair), progress=False)
    assert {t.lever: t.verdict for t in loop.tuning.trials}["fused"] in ("kept", "dropped")


class Lazy(OrderedDict[str, int]):
    """As tables of libraries that load what is asked for."""

    def values(self) -> Any:
        raise AssertionError("it was asked for")

    items = keys = __iter__ = values


class Failing(Mapping[str, int]):
    __slots__ = ()

    def __getitem__(self, key: str) -> int:
        raise RuntimeError("gone")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("gone")

    def __len__(self) -> int:
        return 1


def test_objects_that_fail_where_they_are_looked_at_do_not_end_a_run() -> None:
    lazy, failing = Lazy({"a": 1}), Failing()

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch.x), batch.y) * (lazy is not failing)

    model = nn.Linear(8, 1)
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), objective=objective, device="cpu")
    assert loop.fit(batches_of(Pair), progress=False).steps == BATCHES


def test_what_a_look_at_the_memory_changes_in_a_batch_is_named() -> None:
    (batch, *_), model = batches_of(Pair), nn.Linear(8, 1)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        batch.calls += 1
        return nn.functional.mse_loss(model(batch.x), batch.y)

    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters()), objective=objective, device="cpu", plan="plain")
    with pytest.warns(PlanWarning, match=r"real steps have changed batch\.calls, which cannot be restored"):
        loop.memory(batch)
