"""What resumes where it was, and what says so where it does not: by public names alone."""

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hotloop
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.run.parts.validation import Evaluating

ITEMS, BATCH = 40, 4


class Rows(IterableDataset[Any]):
    """Rows in their order, with a length."""

    def order(self) -> list[int]:
        return list(range(ITEMS))

    def __iter__(self) -> Iterator[Any]:
        for i in self.order():
            yield torch.tensor([float(i)]), torch.tensor([2.0 * i])

    def __len__(self) -> int:
        return ITEMS


class Shuffled(Rows):
    """In another order in each epoch, which it counts itself."""

    def __init__(self) -> None:
        self.epochs = 0

    def order(self) -> list[int]:
        rows, draws = list(range(ITEMS)), random.Random(self.epochs)  # noqa: S311
        self.epochs += 1
        draws.shuffle(rows)
        return rows


class Unsized(Shuffled):
    __len__ = None


class Stateful(Rows):
    """Goes on from where it says that it is."""

    def __init__(self) -> None:
        self.at = 0

    def order(self) -> Any:
        while self.at < ITEMS:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stop_after(step: int | None) -> Callable[[Any], str | None]:
    return lambda record: "stop" if record.step == step else None


@pytest.mark.parametrize("stop", [4, 14])  # in the first epoch, and in the second
@pytest.mark.parametrize("kind", [Rows, Shuffled, Unsized, Stateful])
def test_a_dataset_that_is_iterated_resumes_at_its_place_in_the_epoch(
    kind: Callable[[], Rows], stop: int, tmp_path: Path
) -> None:
    def trained(name: str, stop: int | None = None) -> tuple[hotloop.Report, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-4), nn.MSELoss(), device="cpu", plan="plain")
        saving = {"save": tmp_path / name, "resume": True, "on_step": stop_after(stop)}
        report = loop.fit(DataLoader(kind(), BATCH), epochs=2, progress=False, **saving)
        return report, model.weight.detach()

    whole, expected = trained("whole")
    first, _ = trained("stopped", stop)
    second, weight = trained("stopped")
    assert (first.steps, second.steps) == (stop, whole.steps)
    assert second.curve == whole.curve
    assert torch.equal(weight, expected)


class Counting(nn.Linear):
    """Holds plain values that PyTorch's `state_dict` leaves out, and computes with them."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.seen = bytearray(4)
        self.log = bytearray()
        self.phase = 1 + 0j

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen[len(self.log) % 4] += 1
            self.log.append(len(self.log) % 256)
            self.phase *= 1j
        return super().forward(x) * (1 + self.seen[0] + len(self.log)) + self.phase.real


def test_a_bytearray_and_a_complex_number_of_a_module_resume(tmp_path: Path) -> None:
    def trained(name: str, stop: int | None = None) -> Counting:
        torch.manual_seed(0)
        model = Counting()
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu", plan="plain")
        data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
        loop.fit(data, save=tmp_path / name, resume=True, on_step=stop_after(stop), progress=False)
        return model

    whole = trained("whole")
    trained("stopped", 3)
    again = trained("stopped")
    assert (again.seen, again.log, again.phase) == (whole.seen, whole.log, whole.phase)
    assert torch.equal(again.weight, whole.weight)


def test_what_the_function_of_a_scheduler_keeps_is_named_when_it_is_saved(tmp_path: Path) -> None:
    calls = 0

    def rate(epoch: int) -> float:
        nonlocal calls
        calls += 1
        return 0.9**calls

    class Decay:
        factor = 1.0

        def rate(self, epoch: int) -> float:
            self.factor *= 0.9
            return self.factor

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        torch.optim.lr_scheduler.LambdaLR(optimizer, Decay().rate),
    ]
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain", scheduler=schedulers)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
    with pytest.warns(CheckpointWarning, match=r"holds, .*: calls, scheduler 1.factor"):
        loop.fit(data, save=tmp_path, progress=False)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def fitted(
    make: Callable[[Any], torch.optim.Optimizer],
    change: Callable[[dict[str, Any], int], Any],
    folder: Path,
    stop: int | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """A fit whose hook changes the settings of the optimizer after each step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = make(model.parameters())
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain", clip_norm=1.0)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]

    def on_step(record: Any) -> str | None:
        change(optimizer.param_groups[0], record.step)
        return "stop" if record.step == stop else None

    loop.fit(data, save=folder, resume=True, on_step=on_step, progress=False)
    return model.weight.detach(), {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


KINDS: dict[str, Callable[[float], Any]] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "a tensor": torch.tensor,
}


@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_a_hook_makes_any_kind_of_number_resume(kind: str, tmp_path: Path) -> None:
    names = ("lr", "momentum", "weight_decay", "own")

    def change(group: dict[str, Any], step: int) -> None:
        group |= {name: KINDS[kind](0.5 * math.exp(-step)) for name in names}

    whole, groups = fitted(sgd, change, tmp_path / "whole")
    fitted(sgd, change, tmp_path / "stopped", stop=3)
    weight, found = fitted(sgd, change, tmp_path / "stopped")
    assert torch.equal(weight, whole)
    assert [(type(found[name]), found[name]) for name in names] == [(type(groups[n]), groups[n]) for n in names]


def test_keys_of_a_person_and_betas_as_a_list_resume(tmp_path: Path) -> None:
    def change(group: dict[str, Any], step: int) -> None:
        group["betas"] = [0.9 - 0.1 / step, 0.99]
        group |= {"count": step, "word": f"step {step}", "list": [step, "a"], "array": np.array([step])}
        group |= {"dict": {"warm": True, "since": step}, "complex": step * 1j, "nothing": None if step > 4 else "some"}

    whole, groups = fitted(adam, change, tmp_path / "whole")
    fitted(adam, change, tmp_path / "stopped", stop=3)
    weight, found = fitted(adam, change, tmp_path / "stopped")
    assert torch.equal(weight, whole)
    assert found == groups


def test_what_resuming_would_refuse_is_said_when_it_is_saved(tmp_path: Path) -> None:
    def change(group: dict[str, Any], step: int) -> None:
        group["momentum"] = "0.9" if step == 6 else 0.9

    says = "momentum is not what a run"
    with pytest.warns(CheckpointWarning, match=f"cannot resume from the checkpoint of step 6: .*{says}") as told:
        fitted(sgd, change, tmp_path)
    assert len(told) == 1
    with pytest.raises(hotloop.HotloopError, match=says):
        fitted(sgd, change, tmp_path)


def test_what_is_no_tensor_in_a_checkpoint_does_not_grow_with_the_epochs(tmp_path: Path) -> None:
    def trained(epochs: int) -> hotloop.Report:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        loop = hotloop.Loop(
            model, torch.optim.SGD(model.parameters(), 1e-3), nn.CrossEntropyLoss(), device="cpu", plan="plain"
        )
        data = [(torch.randn(4, 2), torch.arange(4) % 2)]
        evaluated = {"validate": data, "metrics": {"accuracy": hotloop.metrics.accuracy}}
        return loop.fit(data, epochs=epochs, save=tmp_path, resume=True, every="1h", progress=False, **evaluated)

    def length() -> int:
        latest = max(tmp_path.glob("step-*"))
        state = json.loads((latest / "state.json").read_text())
        del state["loop"]["watch"]["curve"]  # which is thinned out: at most a thousand points
        return len(json.dumps(state))

    first = trained(3)
    short = length()
    report = trained(40)
    assert length() < short + 40  # digits of larger numbers
    assert report.epochs[:3] == first.epochs
    assert [epoch.number for epoch in report.epochs] == list(range(1, 41))
    assert trained(41).epochs[:40] == report.epochs


def test_a_checkpoint_of_an_older_version_says_that_evaluations_draw_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,)))] * 2
    for epochs in (1, 2):
        model = nn.Linear(4, 3)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu")
        told = nullcontext() if epochs == 1 else pytest.warns(CheckpointWarning, match="older hotloop.*draw anew")
        with monkeypatch.context() as older, told:
            if epochs == 1:  # as it was saved before
                older.setattr(Evaluating, "state_dict", lambda part: {"draws": {"own": [], "samplers": []}})
            loop.fit(data, epochs=epochs, validate=data, save=tmp_path, resume=True, progress=False)
    assert loop.steps == 4
