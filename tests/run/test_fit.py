"""`Loop.fit`: epochs, evaluation, the report, and Ctrl-C."""

import json
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop import Loop, Report
from hotloop.errors import BadArgument, EmptyLoader


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


@pytest.fixture
def loop(task) -> Loop:
    model = task.model()
    return Loop(model, torch.optim.Adam(model.parameters(), 0.01), nn.CrossEntropyLoss(), device="cpu")


def test_batches_of_any_form_have_metrics_where_it_is_said_what_they_are() -> None:
    model = nn.Linear(3, 2)
    batches = [{"x": torch.randn(4, 3), "answer": torch.randint(2, (4,))} for _ in range(3)]

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["answer"])

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch["x"]), batch["answer"]

    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), objective=objective, device="cpu")
    given: dict[str, Any] = {"validate": batches, "metrics": {"accuracy": accuracy}, "progress": False}
    report = loop.fit(batches, predict=predict, dry_run=1, **given)
    right = torch.cat([accuracy(*predict(model, batch)) for batch in batches])
    assert report.epochs[0].metrics["accuracy"] == pytest.approx(float(right.float().mean()))
    with pytest.raises(BadArgument, match=r"predict=lambda model, batch: \(output, target\) in fit and evaluate"):
        loop.fit(batches, **given)


def test_the_report_is_what_happened(task, loop) -> None:
    report = loop.fit(
        task.loader(16), epochs=3, validate=task.loader(50), metrics={"accuracy": accuracy}, progress=False
    )
    assert [epoch.number for epoch in report.epochs] == [1, 2, 3]
    assert [epoch.items for epoch in report.epochs] == [103] * 3
    assert report.steps == 21
    assert len(report.curve) == 21
    assert report.epochs[2].loss < report.epochs[0].loss
    assert set(report.epochs[0].metrics) == {"loss", "accuracy"}
    assert not report.interrupted
    assert report.peak_memory is None, "a CPU does not tell, so it is unknown"
    assert sum(epoch.seconds for epoch in report.epochs) <= report.seconds
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_fit_goes_on_where_it_ended(task, loop) -> None:
    first = loop.fit(task.loader(), progress=False)
    second = loop.fit(task.loader(), progress=False)
    assert second.epochs[0].loss < first.epochs[0].loss
    assert (second.steps, loop.steps, loop.epoch) == (first.steps, 2 * first.steps, 2)
    assert [batch for batch, _ in second.curve] == list(range(1, 8)), "the curve is that of this fit"


def test_an_iterator_lasts_one_epoch(task, loop) -> None:
    with pytest.raises(EmptyLoader, match="used up by an earlier epoch"):
        loop.fit(iter(list(task.loader())), epochs=2, progress=False)


@pytest.mark.gpu
def test_the_report_from_a_gpu(task) -> None:
    model = task.model()
    loop = Loop(model, torch.optim.Adam(model.parameters(), 0.01), nn.CrossEntropyLoss(), device="cuda")
    report = loop.fit(task.loader(), epochs=2, validate=task.loader(), metrics={"a": accuracy}, progress=False)
    assert report.device == "cuda:0"
    assert report.device_name == torch.cuda.get_device_name()
    assert report.peak_memory > 0
    assert report.epochs[1].loss < report.epochs[0].loss


def windowed(task: Any) -> Loop:
    model = task.model()
    return Loop(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu", plan="plain", accumulate=3
    )


@pytest.mark.parametrize("stop", [{"on_step": lambda record: "stop"}, {"time_limit": 1e-6}], ids=["hook", "time limit"])
def test_a_window_of_accumulation_is_completed_before_an_end_that_saves_nothing(task, stop: dict[str, Any]) -> None:
    loop = windowed(task)
    assert loop.fit(task.loader(), progress=False, **stop).steps == 1
    assert loop.is_between_windows
    assert loop._core.watch.batches == 3


def test_gradients_of_a_fit_that_failed_are_not_in_the_next(task) -> None:
    def fail(record: Any) -> None:
        if record.batch == 2:
            raise ZeroDivisionError

    failed, new = windowed(task), windowed(task)
    with pytest.raises(ZeroDivisionError):
        failed.fit(task.loader(), on_step=fail, progress=False)
    for loop in (failed, new):
        assert loop.fit(task.loader(), progress=False).steps == 3
    assert all(torch.equal(a, b) for a, b in zip(failed.model.parameters(), new.model.parameters(), strict=True))


def test_ctrl_c_twice_before_the_first_batch_leaves_a_report(task, loop) -> None:
    class Pressed(list[Any]):
        def __iter__(self) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            return super().__iter__()

    report = loop.fit(Pressed(task.loader()), validate=task.loader(), restore_best=True, progress=False)
    assert (report.interrupted, report.steps, report.epochs) == (True, 0, ())
