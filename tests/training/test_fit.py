"""`Loop.fit`: epochs, evaluation, the report, and Ctrl-C."""

import json
import os
import re
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from hotloop import Loop, Report
from hotloop.errors import BadArgument, EmptyLoader, MemoryWarning

from ..warm import Warm


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


def test_the_mean_loss_is_over_items(task, loop) -> None:
    model_before = [p.clone() for p in loop.model.parameters()]
    for group in loop._core.optimizers[0].param_groups:
        group["lr"] = 0.0
    report = loop.fit(task.loader(16), progress=False)
    expected = nn.functional.cross_entropy(loop.model(task.inputs), task.targets).item()
    assert report.epochs[0].loss == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(model_before, loop.model.parameters(), strict=True))


def test_fit_goes_on_where_it_ended(task, loop) -> None:
    first = loop.fit(task.loader(), progress=False)
    second = loop.fit(task.loader(), progress=False)
    assert second.epochs[0].loss < first.epochs[0].loss
    assert (second.steps, loop.steps, loop.epoch) == (first.steps, 2 * first.steps, 2)
    assert [batch for batch, _ in second.curve] == list(range(1, 8)), "the curve is that of this fit"


@pytest.mark.parametrize("epochs", [0, -1])
def test_counts_that_cannot_be_meant(task, loop, epochs: int) -> None:
    with pytest.raises(BadArgument, match="at least 1"):
        loop.fit(task.loader(), epochs=epochs)


def test_an_iterator_lasts_one_epoch(task, loop) -> None:
    with pytest.raises(EmptyLoader, match="used up by an earlier epoch"):
        loop.fit(iter(list(task.loader())), epochs=2, progress=False)


class InterruptAt:
    """A loss that presses Ctrl-C when it has been asked for a number of times."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return nn.functional.cross_entropy(output, target)


def test_ctrl_c_ends_after_the_step_that_is_running(task) -> None:
    model = task.model()
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), InterruptAt(17), device="cpu")
    handler = signal.getsignal(signal.SIGINT)
    report = loop.fit(task.loader(16), epochs=5, validate=task.loader(), progress=False)
    assert report.interrupted
    assert report.steps == 10  # of the 17 calls, 7 were the evaluation's
    assert [epoch.items for epoch in report.epochs] == [103, 48]
    assert report.epochs[1].metrics == {}, "no evaluation after Ctrl-C"
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_during_the_evaluation_ends_at_once(task, loop) -> None:
    def interrupt(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return accuracy(output, target)

    report = loop.fit(task.loader(), epochs=5, validate=task.loader(), metrics={"a": interrupt}, progress=False)
    assert report.interrupted
    assert len(report.epochs) == 1
    assert loop.model.training, "back from eval mode"


def test_fit_works_in_a_thread(task, loop) -> None:
    reports: list[Report] = []
    thread = threading.Thread(target=lambda: reports.append(loop.fit(task.loader(), progress=False)))
    thread.start()
    thread.join()
    assert reports[0].steps == 7


def test_ctrl_c_with_workers_in_a_real_process(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch, hotloop, sys
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        def main():
            model = nn.Linear(4, 1)
            data = DataLoader(TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), 8, num_workers=2)
            loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu")
            report = loop.fit(data, epochs=100000)
            print("interrupted", report.interrupted, "steps", report.steps)

        if __name__ == "__main__":
            main()
        """)
    )
    out, err = tmp_path / "out", tmp_path / "err"
    process = warm.start(script, cwd=tmp_path, out=out, err=err, own_session=True)
    while not re.search("^epoch 1/", err.read_text(), re.MULTILINE):
        assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    assert process.wait() == 0, err.read_text()
    assert out.read_text().startswith("interrupted True steps ")
    assert "Traceback" not in err.read_text()


@pytest.mark.gpu
def test_the_report_from_a_gpu(task) -> None:
    model = task.model()
    loop = Loop(model, torch.optim.Adam(model.parameters(), 0.01), nn.CrossEntropyLoss(), device="cuda")
    report = loop.fit(task.loader(), epochs=2, validate=task.loader(), metrics={"a": accuracy}, progress=False)
    assert report.device == "cuda:0"
    assert report.device_name == torch.cuda.get_device_name()
    assert report.peak_memory is not None
    assert report.peak_memory > 0
    assert report.epochs[1].loss < report.epochs[0].loss


def test_a_loader_without_a_batch_is_refused_also_where_its_data_lives_on_the_device(task) -> None:
    model = task.model()
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu")
    with pytest.raises(EmptyLoader, match="fewer than batch_size=500"):
        loop.fit(task.loader(500, drop_last=True), progress=False)


def test_a_cache_that_is_emptied_in_every_step_is_told(task: Any) -> None:
    model = task.model()

    def objective(model: nn.Module, batch: Any) -> Tensor:
        torch.cuda.empty_cache()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), objective=objective, device="cpu", plan="plain")
    before = torch.cuda.empty_cache
    with pytest.warns(MemoryWarning, match="test_fit.py"):
        loop.fit(task.loader(), progress=False)
    assert torch.cuda.empty_cache is before


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
    assert failed._core.tuner.display is None


def test_ctrl_c_twice_before_the_first_batch_leaves_a_report(task, loop) -> None:
    class Pressed(list[Any]):
        def __iter__(self) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            return super().__iter__()

    report = loop.fit(Pressed(task.loader()), validate=task.loader(), restore_best=True, progress=False)
    assert (report.interrupted, report.steps, report.epochs) == (True, 0, ())
