"""A dry run tries every part of a run and leaves no trace: the training after it is equal to the bit."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import hotloop
from hotloop.errors import BadArgument, HotloopError, PlanWarning
from hotloop.run.callbacks import EpochRecord, StepRecord
from hotloop.run.dry_run import DryRunFailed

from ..same import same

QUIET: dict[str, Any] = {"progress": False, "monitor": False}


class Noisy(nn.Module):
    """Draws random numbers, keeps buffers, counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.layers(x)


def run(task: Any, dry_run: int | None, folder: Path | None = None, **options: Any) -> tuple[Any, ...]:
    """A run of two epochs, and everything that it could have left behind."""
    hotloop.seed(0)
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler, metrics = hotloop.WarmupCosine(optimizer, steps=14), {"accuracy": hotloop.metrics.accuracy}
    ema = hotloop.Ema(model, decay=0.9)
    given = {"scheduler": scheduler, "stateful": {"ema": ema}, "train_metrics": metrics}
    given |= {"device": "cpu", "plan": "plain", "accumulate": options.pop("accumulate", 1)}
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), **given)
    loader = task.loader(16, **options.pop("data", {}))
    options |= {"validate": task.loader(16), "metrics": metrics, "on_step": ema, "save": folder}
    report = loop.fit(loader, epochs=2, dry_run=dry_run, **QUIET, **options)
    epochs = [(e.loss, e.items, e.metrics, e.train_metrics) for e in report.epochs]
    kept = [*model.state_dict().values(), *ema.state_dict().values()]
    drawn = [torch.rand(1).item(), random.getstate(), np.random.rand()]
    return epochs, report.steps, report.curve, loop.steps, loop.epoch, model.calls, scheduler.last_epoch, drawn, kept


@pytest.mark.filterwarnings("ignore:batch normalisation")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_training_after_it_is_the_same_to_the_bit(task, tmp_path: Path, accumulate: int) -> None:
    def noisy(batch: Any) -> Any:
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]

    options: dict[str, Any] = {"device_transform": noisy, "accumulate": accumulate}
    plain = run(task, None, tmp_path / "plain", **dict(options))
    assert same(plain, run(task, 3, tmp_path / "tried", log=tmp_path / "log.jsonl", **options))
    assert {each.name for each in (tmp_path / "tried").iterdir()} == {
        each.name for each in (tmp_path / "plain").iterdir()
    }, "its files are gone"


def test_workers_begin_as_they_would(task) -> None:
    data = {"num_workers": 1}
    assert same(run(task, None, data=data), run(task, 2, data=data))


def loop_of(**options: Any) -> hotloop.Loop:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain", **options)


def test_a_line_says_what_worked_and_how_long_an_epoch_takes(task, tmp_path: Path, capsys) -> None:
    everything = {"validate": task.loader(16), "save": tmp_path, "log": tmp_path / "a.jsonl", "monitor": False}
    loop_of().fit(task.loader(16), dry_run=3, on_step=print, on_epoch=print, **everything)
    first = capsys.readouterr().err.splitlines()[0]
    parts = "training, on_step, validation, on_epoch, saving, logging"
    assert first.startswith(f"dry run: 3 steps of {parts} worked; an epoch takes about ")
    assert "dry run" not in (tmp_path / "a.jsonl").read_text()


def test_hooks_get_real_records_that_say_what_they_are(task) -> None:
    loop, steps, epochs = loop_of(), [], []

    def on_step(record: StepRecord) -> str:
        steps.append((record.dry_run, record.step, record.epoch, record.batch, float(record.loss) > 0))
        assert record.model is loop.model
        return "stop"  # which ends the run, and not the dry run

    def on_epoch(record: EpochRecord) -> None:
        epochs.append((record.dry_run, record.epoch.items, "loss" in record.epoch.metrics))

    report = loop.fit(task.loader(16), dry_run=2, validate=task.loader(16), on_step=on_step, on_epoch=on_epoch, **QUIET)
    assert steps == [(True, 1, 1, 1, True), (True, 2, 1, 2, True), (False, 1, 1, 1, True)]
    assert epochs == [(True, 32, True)]
    assert report.stopped == "on_step"


class Jitter:
    """A transform of batches or a `collate_fn`, with a generator and a counter of its own."""

    def __init__(self) -> None:
        self.rng, self.calls = np.random.default_rng(0), 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        inputs, targets = default_collate(batch) if isinstance(batch[0], tuple) else batch
        return inputs + float(self.rng.random()) * self.calls, targets


class Counting(TensorDataset):
    """A dataset whose items depend on how many were read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        inputs, target = super().__getitem__(index)
        return inputs * (1 + 0.01 * self.reads), target


class OwnLoader:
    """A loader that is none of PyTorch's, with a generator of its own."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.generator = tensors, torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.tensors[0]), generator=self.generator)
        return (tuple(tensor[some] for tensor in self.tensors) for some in order.split(16))


class Remembering(nn.Linear):
    """A layer with a list, a dict and generators."""

    def __init__(self, inputs: int = 6, outputs: int = 3) -> None:
        super().__init__(inputs, outputs)
        self.seen: list[int] = []
        self.counts = {"calls": 0}
        self.generator, self.random = torch.Generator().manual_seed(0), random.Random(0)  # noqa: S311

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.counts["calls"] += 1
        noise = torch.rand(1, generator=self.generator) + self.random.random()
        return super().forward(x) + noise * (len(self.seen) + self.counts["calls"])


class Averaging:
    """A hook that holds an average of the weights, and gives some of it to the model."""

    def __init__(self, model: nn.Module) -> None:
        self.average = AveragedModel(model)

    @torch.no_grad()
    def follow(self, record: StepRecord) -> None:
        self.average.update_parameters(record.model)
        for mine, averaged in zip(record.model.parameters(), self.average.parameters(), strict=True):
            mine.lerp_(averaged, 0.5)


class Drifting:
    """A hook that tells its state, which is a tensor that it writes to, and moves the weights by it."""

    def __init__(self) -> None:
        self.steps = torch.zeros(1)

    @torch.no_grad()
    def __call__(self, record: StepRecord) -> None:
        self.steps += 1
        next(record.model.parameters()).add_(0.01 * self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Lookahead(torch.optim.Optimizer):
    """A wrapper of another optimizer, which counts its steps in an attribute, as people write one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.calls = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.inner.step()
        self.calls += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            if self.calls % 5 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))


@pytest.mark.parametrize("own", [False, True])
def test_what_parts_of_a_run_keep_for_themselves_is_put_back(task, own: bool) -> None:
    """Module, dataset, `collate_fn`, transform, hooks and a wrapper of an optimizer; and a loader of one's own."""

    def trained(dry_run: int | None) -> Tensor:
        hotloop.seed(0)
        model, drifting = Remembering(), Drifting()
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        loader: Any = OwnLoader(task.inputs, task.targets)
        if not own:
            loader = DataLoader(Counting(task.inputs, task.targets), 16, collate_fn=Jitter())
        loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")
        hooks = [Averaging(model).follow, drifting]
        loop.fit(loader, epochs=2, dry_run=dry_run, device_transform=Jitter(), on_step=hooks, **QUIET)
        assert optimizer.calls == drifting.steps == loop.steps
        return model.weight

    assert torch.equal(trained(None), trained(3))


class Deep(nn.Linear):
    """A layer that writes where nobody puts it back."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.notes: dict[str, list[int]] = {"sizes": []}

    def forward(self, x: Tensor) -> Tensor:
        self.notes["sizes"].append(len(x))
        return super().forward(x)


def test_what_cannot_be_put_back_is_named(task) -> None:
    model = Deep()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters()), nn.CrossEntropyLoss(), device="cpu", plan="plain")
    with pytest.warns(PlanWarning, match=r"real steps have changed model\.notes, which cannot be restored"):
        loop.fit(task.loader(16), dry_run=3, **QUIET)


class Unsaveable:
    """Tells a state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Damaged(Dataset[Any]):
    """Its fourth item cannot be read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("no such picture")
        return torch.zeros(6), 0


def fails(record: Any) -> None:
    raise RuntimeError("no display")


@pytest.mark.parametrize(
    ("part", "options", "words"),
    [
        ("training", {"loader": DataLoader(Damaged(), 2)}, "OSError: .*no such picture"),
        ("training", {"loader": [(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long))] * 3}, "cannot be used"),
        ("validation", {"validate": [(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long))]}, "cannot be used"),
        ("validation", {"metrics": {"odd": lambda output, target: 1 / 0}}, "ZeroDivisionError"),
        ("on_step", {"on_step": fails}, "RuntimeError: no display"),
        ("on_epoch", {"on_epoch": fails}, "RuntimeError: no display"),
        ("on_epoch", {"on_epoch": lambda record: "stopp"}, "on_epoch returned 'stopp'"),
        ("saving", {"stateful": {"odd": Unsaveable()}}, "object"),
        ("logging", {"log": "run.txt"}, "neither a logger's name nor a path"),
    ],
)
def test_what_fails_is_named_and_all_is_as_before(
    task, tmp_path: Path, part: str, options: dict[str, Any], words: str
) -> None:
    loop = loop_of(stateful=options.pop("stateful", None))
    before = loop.model.weight.clone()
    given = {"loader": task.loader(16), "validate": task.loader(16), "save": tmp_path / "run", **options}
    with pytest.raises(DryRunFailed, match=rf"(?s)^dry run: {part}: .*{words}") as error:
        loop.fit(given.pop("loader"), dry_run=3, **given, **QUIET)
    assert isinstance(error.value, HotloopError)
    assert error.value.__cause__ is not None
    assert torch.equal(loop.model.weight, before)
    assert (loop.steps, loop.epoch) == (0, 0)
    assert not [each for each in (tmp_path / "run").iterdir() if each.is_dir()]


def once(task: Any) -> Iterator[Any]:
    yield from task.loader(16)


def test_what_cannot_be_meant_is_refused(task) -> None:
    for wrong in (0, -1, True, 2.5, "3"):
        with pytest.raises(BadArgument, match="dry_run="):
            loop_of().fit(task.loader(16), dry_run=wrong, **QUIET)
    with pytest.raises(BadArgument, match="can be read only once"):
        loop_of().fit(once(task), dry_run=3, **QUIET)


def test_a_loader_shorter_than_it_is_enough(task) -> None:
    report = loop_of().fit([(task.inputs, task.targets)], dry_run=3, **QUIET)
    assert report.steps == 1


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [0, 2])
def test_on_a_gpu_the_training_after_it_is_the_same(task, graph: int) -> None:
    found = []
    for dry_run in (None, 3):
        hotloop.seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        plan = hotloop.Plan("cuda", graph=graph, stream="resident")
        loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), plan=plan)
        loop.fit(task.loader(16), epochs=4, validate=task.loader(16), dry_run=dry_run, **QUIET)
        found.append((loop.steps, torch.rand(1, device="cuda").item(), list(model.state_dict().values())))
    assert found[0][:2] == found[1][:2]
    for a, b in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
