"""Hooks are told of every step and epoch, may end a run, and read nothing from the device by themselves."""

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop._torch import DispatchMode
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.checkpoint.store import Store
from hotloop.errors import BadArgument
from hotloop.records import Epoch
from hotloop.run.callbacks import EpochRecord, Goal, StepRecord

from .test_state import Script, assert_resumed_alike

pytestmark = pytest.mark.filterwarnings(
    "ignore:training changes state that no checkpoint holds", "ignore:the run may differ"
)


def data(rows: int = 48, batch: int = 8) -> DataLoader[Any]:
    x = torch.linspace(-1, 1, rows * 3).view(rows, 3)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch)


def loop_of(lr: float = 0.1, **options: Any) -> hotloop.Loop:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return hotloop.Loop(
        model, torch.optim.SGD(model.parameters(), lr), nn.MSELoss(), device="cpu", plan="plain", **options
    )


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["plain", hotloop.Plan("cuda", graph=1, stream="resident", fused=True)])
def test_on_a_gpu_an_epoch_is_told_before_the_next_one_begins(plan: Any) -> None:
    torch.manual_seed(0)
    # The device takes long for a step, so that the host could be far ahead of it.
    model = nn.Sequential(nn.Linear(3, 4096), *(nn.Linear(4096, 4096) for _ in range(8)), nn.Linear(4096, 1))
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cuda", plan=plan)
    told: list[tuple[int, int, bool]] = []

    def freeze(record: EpochRecord) -> None:
        told.append((record.epoch.number, record.step, torch.equal(frozen[-1], model[0].weight)))
        model[0].requires_grad_(record.epoch.number % 2 == 0)
        frozen.append(model[0].weight.detach().clone())

    frozen = [model[0].weight.detach().clone()]
    loop.fit(data(16, 8), epochs=6, on_epoch=freeze, progress=False, monitor=False)
    assert told == [(number, 2 * number, number % 2 == 0) for number in range(1, 7)]


def test_each_step_and_epoch_is_told() -> None:
    loop, steps, epochs = loop_of(), [], []

    def on_step(record: StepRecord) -> None:
        steps.append((record.step, record.epoch, record.batch, float(record.loss), record.lr))
        assert record.model is loop.model

    def on_epoch(record: EpochRecord) -> None:
        epochs.append((record.step, record.epoch.number, record.epoch.metrics["loss"]))

    report = loop.fit(data(), epochs=2, validate=data(), on_step=on_step, on_epoch=on_epoch, progress=False)
    assert [each[:3] for each in steps] == [
        (6 * (epoch - 1) + batch, epoch, batch) for epoch, batch in itertools.product((1, 2), range(1, 7))
    ]
    assert all(each[4] == 0.1 for each in steps)
    assert sum(each[3] for each in steps[:6]) / 6 == pytest.approx(report.epochs[0].loss)
    assert epochs == [(6, 1, report.epochs[0].metrics["loss"]), (12, 2, report.epochs[1].metrics["loss"])]


class Reads(DispatchMode):
    """Counts the operations by which a number of the device reaches the host: where it is a GPU, each of them waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_logging_four_numbers_of_each_step_reads_nothing(tmp_path: Path) -> None:
    def noted(record: StepRecord) -> None:
        log.append((record.step, record.epoch, record.lr, record.loss))

    def read(record: StepRecord) -> None:
        float(record.loss)

    counts, log = [], []
    for hook in (None, noted, read):
        loop = loop_of()
        with Reads() as reads:
            loop.fit(
                data(), epochs=2, on_step=hook, progress=False, monitor=False, log=tmp_path / f"{len(counts)}.jsonl"
            )
        counts.append(reads.count)
    assert counts[1] == counts[0]
    assert counts[2] == counts[0] + 12, "what reads is counted"
    assert len({float(loss) for *_, loss in log}) == 12, "each step has a loss of its own"


@pytest.mark.parametrize(("hook", "steps"), [("on_step", 3), ("on_epoch", 6)])
def test_a_hook_ends_the_run(hook: str, steps: int, tmp_path: Path) -> None:
    loop = loop_of()
    calls: list[int] = []

    def ends(record: Any) -> str | None:
        calls.append(1)
        return "stop" if hook == "on_epoch" or len(calls) == 3 else None

    report = loop.fit(data(), epochs=5, progress=False, save=tmp_path, **{hook: ends})
    assert report.steps == report.saved == steps
    assert report.stopped == hook
    report = loop_of().fit(data(), epochs=5, progress=False, save=tmp_path, resume=True)
    assert report.steps == 30, "it continues from there"


def accuracy_of(values: list[float]) -> Any:
    numbers = iter(values)
    return lambda output, target: torch.full((len(output),), next(numbers))


def scored(loop: hotloop.Loop, epochs: int, values: list[float], **options: Any) -> hotloop.Report:
    """A run with these accuracies, epoch by epoch."""
    options = {"best": "accuracy", "progress": False} | options
    metrics = {"accuracy": accuracy_of(values)}
    return loop.fit(data(), epochs=epochs, validate=data(batch=48), metrics=metrics, **options)


def kept_in(weights: list[Tensor]) -> Callable[[EpochRecord], None]:
    return lambda record: weights.append(record.model.weight.detach().clone())


def test_patience_and_the_best_epoch() -> None:
    loop, weights = loop_of(), []
    values = [0.5, 0.7, 0.6, 0.7, 0.65, 0.9]
    report = scored(loop, 6, values, patience=3, restore_best=True, on_epoch=kept_in(weights))
    assert len(report.epochs) == 5
    assert report.stopped == "no better accuracy in 3 epochs"
    assert (report.best.epoch, report.best.metric) == (2, "accuracy")
    assert report.best.value == pytest.approx(0.7)
    assert torch.equal(loop.model.weight, weights[1])
    assert "best accuracy 0.7 in epoch 2" in str(report)
    assert hotloop.Report.from_json(report.to_json()) == report


def test_the_best_checkpoint_is_that_of_the_metric_and_is_found_by_a_run_that_was_resumed(tmp_path: Path) -> None:
    weights: list[Tensor] = []

    def fit(epochs: int, values: list[float]) -> tuple[hotloop.Loop, hotloop.Report]:
        loop = loop_of()
        saving = {"save": tmp_path, "keep": 1, "resume": True}
        return loop, scored(loop, epochs, values, restore_best=True, on_epoch=kept_in(weights), **saving)

    fit(2, [0.4, 0.8])
    loop, report = fit(4, [0.5, 0.6])
    assert report.resumed == 1
    assert report.best.epoch == 2
    assert torch.equal(loop.model.weight, weights[1])


def grown(model: nn.Module) -> None:
    model.more = torch.cat([model.more, torch.ones(2)])


def renamed(model: nn.Module) -> None:
    if not hasattr(model, "weight_orig"):
        prune.identity(model, "weight")


@pytest.mark.parametrize("change", [grown, renamed])
def test_best_weights_that_do_not_fit_any_more_are_told_and_the_last_stay_whole(change: Any) -> None:
    loop = loop_of()
    loop.model.register_buffer("more", torch.zeros(1))
    last: dict[str, Tensor] = {}

    def on_epoch(record: EpochRecord) -> None:
        change(record.model)
        last.update({name: each.clone() for name, each in record.model.state_dict().items()})

    with pytest.warns(CheckpointWarning, match=r"weights of epoch 1 cannot be restored.*(size mismatch|weight_orig)"):
        report = scored(loop, 3, [0.9, 0.8, 0.7], restore_best=True, on_epoch=on_epoch)
    assert report.best.epoch == 1
    assert all(torch.equal(each, last[name]) for name, each in loop.model.state_dict().items())


class Learned(nn.Module):
    """A criterion with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output * self.scale, target)


def test_the_best_weights_are_also_those_of_a_criterion_in_one_part_or_two(tmp_path: Path) -> None:
    best: list[Tensor] = []
    for parts in ([(3, [0.9, 0.8, 0.7])], [(1, [0.9]), (3, [0.8, 0.7])]):
        for epochs, values in parts:
            torch.manual_seed(0)
            model, criterion = nn.Linear(3, 1), Learned()
            optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.1)
            loop = hotloop.Loop(model, optimizer, criterion, device="cpu", plan="plain")
            options = {"save": tmp_path / str(len(parts)), "resume": True, "restore_best": True}

            def keep(record: EpochRecord, scale: Tensor = criterion.scale) -> None:
                best.append(scale.detach().clone())

            scored(loop, epochs, values, on_epoch=keep, **options)
        assert torch.equal(criterion.scale, best[0])
    assert not torch.equal(best[0], best[1])


def test_a_run_without_patience_left_is_done_and_a_larger_one_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(patience: int | None, values: list[float]) -> hotloop.Report:
        return scored(loop_of(), 6, values, progress=None, patience=patience, save=tmp_path, resume=True)

    for patience, values in ((2, [0.9, 0.8, 0.7]), (2, []), (1, [])):
        report = fit(patience, values)
        assert (report.interrupted, len(report.epochs)) == (False, 3)
        assert report.stopped == f"no better accuracy in {patience} epoch{'s' * (patience > 1)}"
        said = capsys.readouterr().err
        assert bool(values) != ("nothing is left to train" in said)
        assert len(said.splitlines()) == len(values) + 1
    assert len(fit(3, [0.6]).epochs) == 4
    assert len(fit(None, [0.5, 0.4]).epochs) == 6


def test_scores_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    for epochs, best in ((2, "accuracy"), (4, "loss")):
        report = scored(loop_of(), epochs, [0.9, 0.8], best=best, save=tmp_path, resume=True)
    assert report.best.epoch == 4
    assert Store(tmp_path).best() == tmp_path / "step-000000024"


def test_best_weights_that_no_checkpoint_holds_are_told(tmp_path: Path) -> None:
    for epochs, best, values in ((3, "loss", [0.9, 0.8, 0.7]), (4, "accuracy", [0.6])):
        loop = loop_of()
        with (
            pytest.warns(CheckpointWarning, match="weights of epoch 1 .* is of epoch 4")
            if best == "accuracy"
            else nullcontext()
        ):
            scored(loop, epochs, values, best=best, restore_best=True, save=tmp_path, keep=1, resume=True)


def test_an_average_of_the_weights_is_the_one_of_pytorch_and_is_saved() -> None:
    loop = loop_of()
    ours, theirs = hotloop.Ema(loop.model, 0.9), AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loop.fit(data(), epochs=2, on_step=[ours, lambda r: theirs.update_parameters(r.model)], progress=False)
    assert torch.equal(ours.model.weight, theirs.module.weight)
    assert not torch.equal(ours.model.weight, loop.model.weight)

    def build() -> Script:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        ema, optimizer = hotloop.Ema(model, 0.9), torch.optim.SGD(model.parameters(), 0.1)
        loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain", stateful={"ema": ema})
        return Script(loop, data(), {"on_step": ema})

    assert_resumed_alike(build, [8], 2)


class Masked(nn.Linear):
    mask: Tensor
    index: Tensor

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), -math.inf), 1))
        self.register_buffer("index", torch.arange(200))


def test_an_average_has_masks_and_indices_as_the_model_has_them() -> None:
    model = Masked()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan="plain")
    ema = hotloop.Ema(model, 0.9)
    loop.fit(data(), epochs=2, on_step=ema, progress=False)
    assert torch.equal(ema.model.mask, model.mask), "of infinities, an average is NaN"
    assert torch.equal(ema.model.index, model.index), "7 * 0.9 + 7 * 0.1 may be 6.9999"


def test_an_average_that_follows_its_model_to_a_device_is_counted_on_the_host() -> None:
    model = nn.Linear(3, 1)
    ema = hotloop.Ema(model)
    record = SimpleNamespace(step=1, model=model.to("meta"))
    ema(record)
    assert ema.model.weight.is_meta
    assert ema.averaged.n_averaged.device.type == "cpu", "PyTorch reads it in every update"


def test_lazy_layers_have_no_average_yet() -> None:
    with pytest.raises(BadArgument, match=r"decides the shape of weight, bias(.|\n)*model\(x\)"):
        hotloop.Ema(nn.LazyLinear(1))


def test_under_accumulation_an_average_takes_every_update_once_that_of_a_short_window_too() -> None:
    loop = loop_of(accumulate=4)  # 6 batches: a window of 4, and one of 2 at the end of the epoch
    ours, theirs = hotloop.Ema(loop.model, 0.9), AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    seen: list[int] = []

    def by_hand(record: StepRecord) -> None:
        if record.step != (seen[-1] if seen else 0):
            theirs.update_parameters(record.model)
        seen.append(record.step)

    loop.fit(data(), epochs=2, on_step=[ours, by_hand], progress=False)
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4]
    assert torch.equal(ours.model.weight, theirs.module.weight)


@pytest.mark.parametrize(
    ("best", "direction"),
    [
        ("accuracy", "max"),
        ("val_acc", "max"),
        ("top5_accuracy", "max"),
        ("f1", "max"),
        ("mIoU", None),
        (("mIoU", "max"), "max"),
        ("loss", "min"),
        ("word_error", "min"),
        ("perplexity", "min"),
        ("banana", None),
    ],
)
def test_which_way_is_better_is_told_by_the_name_or_asked_for(best: Any, direction: str | None) -> None:
    name = best[0] if isinstance(best, tuple) else best
    if direction is None:
        with pytest.raises(BadArgument, match="max"):
            Goal.of(best, [name])
    else:
        assert Goal.of(best, [name]).direction == direction


class Halves:
    """A metric that computes two numbers, as a collection of torchmetrics does."""

    def to(self, device: torch.device) -> "Halves":
        return self

    def reset(self) -> None:
        self.seen = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.seen += len(target)

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.seen / 2, "other": 0.0}


@pytest.mark.parametrize("dry_run", [None, 1])
def test_one_of_several_numbers_of_a_metric_may_be_the_best(dry_run: int | None) -> None:
    loader = [(torch.ones(4, 1), torch.ones(4, 1))]
    model = nn.Linear(1, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu")
    options: dict[str, Any] = {"validate": loader, "metrics": {"val": Halves()}, "progress": False, "dry_run": dry_run}
    report = loop.fit(loader, best="val/accuracy", **options)
    assert report.best == hotloop.records.BestEpoch(1, "val/accuracy", 2.0)
    for missing in ("val", "val/f1"):
        with pytest.raises(hotloop.errors.HotloopError, match="the evaluation gives loss, val/accuracy, val/other"):
            loop.fit(loader, best=(missing, "max"), **options)


def test_what_an_epoch_costs_does_not_grow_with_those_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scored: list[int] = []
    score = Goal.score

    def counted(goal: Goal, epoch: Epoch) -> float:
        scored.append(epoch.number)
        return score(goal, epoch)

    monkeypatch.setattr(Goal, "score", counted)
    options: dict[str, Any] = {"patience": 100, "restore_best": True, "save": tmp_path, "progress": False}
    loop_of(1e-9).fit(data(8), epochs=30, validate=data(8), **options)
    assert 30 <= len(scored) <= 3 * 30


def test_an_epoch_without_a_number_is_never_the_best_and_of_equals_the_first_is() -> None:
    scores = [float("nan"), 2.0, 2.0]
    report = loop_of(1e-9).fit(
        data(8),
        epochs=3,
        validate=data(8),
        metrics={"score": lambda output, target: torch.tensor(scores[0])},
        best=("score", "min"),
        on_epoch=lambda record: scores.pop(0) and None,
        progress=False,
    )
    assert report.best is not None
    assert (report.best.epoch, report.best.value) == (2, 2.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_step": 3}, "on_step"),
        ({"on_step": lambda record: "halt"}, "halt"),
        ({"patience": 2}, "validate="),
        ({"patience": 0, "validate": True}, "patience=0"),
        ({"restore_best": True}, "validate="),
        ({"best": "accuracy", "validate": True}, "gives loss"),
        ({"best": ("loss", "less"), "validate": True}, "best="),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(options: dict[str, Any], says: str) -> None:
    if options.get("validate"):
        options = {**options, "validate": data()}
    with pytest.raises(BadArgument, match=says) as error:
        loop_of().fit(data(), progress=False, **options)
    assert "fix:" in str(error.value)
