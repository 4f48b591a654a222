"""Every recipe of the cookbook runs, and ends with the weights that a tutorial's loop gives in its place."""

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import hotloop
from hotloop.errors import BadArgument, PlanWarning

PAGE = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
PREAMBLE = SECTIONS.pop("Preamble")
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU, and where files may be written."""
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)


def code_of(section: str) -> str:
    (code,) = FENCE.findall(section)
    return str(code)


def run(title: str, change: Callable[[str], str] = lambda code: code) -> dict[str, Any]:
    """The names of a recipe after it has run in a namespace of its own."""
    names: dict[str, Any] = {"__name__": title}
    for what, code in (("Preamble", code_of(PREAMBLE)), (title, change(code_of(SECTIONS[title])))):
        exec(compile(code, f"<cookbook: {what}>", "exec"), names)  # noqa: S102  # the page is our own
    return names


class TutorialLoop:
    """The loop that a tutorial teaches, with what the recipes ask for, in plain PyTorch."""

    device = torch.device("cpu")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loss: Any = None,
        *,
        objective: Any = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        scheduler: Any = None,
        stateful: Any = None,
    ) -> None:
        self.model, self.loss, self.accumulate, self.clip_norm = model, loss, accumulate, clip_norm
        self.scheduler, self.steps = scheduler, 0
        self.optimizers = optimizer if isinstance(optimizer, dict) else {"loss": optimizer}
        if objective is None:
            objective = lambda model, batch: loss(model(batch[0]), batch[1])  # noqa: E731
        self.objectives = objective if isinstance(objective, dict) else {"loss": objective}

    def step(self, batch: list[Tensor]) -> None:
        for name, objective in self.objectives.items():
            self.model.zero_grad()
            found = objective(self.model, batch)
            value = sum(found.values()) if isinstance(found, dict) else found
            value.backward()
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizers[name].step()
            self.steps += 1
        if self.scheduler is not None:
            self.scheduler.step()

    def fit(
        self,
        loader: Any,
        *,
        epochs: int,
        validate: Any = None,
        metrics: Any = None,
        device_transform: object = None,  # `pad_to`, which must not matter
        on_step: Any = None,
        on_epoch: Any = None,
        best: str = "",
        patience: int | None = None,
        restore_best: bool = False,
    ) -> Any:
        scores: list[float] = []
        weights: list[dict[str, Tensor]] = []
        for number in range(1, epochs + 1):
            window: list[list[Tensor]] = []
            for batch in loader:
                window.append(batch)
                if len(window) == self.accumulate:  # what is accumulated is that of one large batch
                    self.step([torch.cat(each) for each in zip(*window, strict=True)])
                    window.clear()
                if on_step is not None:
                    (rate, *_) = (o.param_groups[0]["lr"] for o in self.optimizers.values())
                    on_step(SimpleNamespace(model=self.model, lr=rate))
            assert not window
            if validate is not None:
                found = evaluate(self.model, validate, metrics)
                scores.append(found.get(best, 0.0))
                weights.append(copy.deepcopy(self.model.state_dict()))
            if on_epoch is not None:
                on_epoch(SimpleNamespace(epoch=SimpleNamespace(number=number), model=self.model, loop=self))
            if patience is not None and number - 1 - scores.index(max(scores)) >= patience:
                break
        if restore_best:
            self.model.load_state_dict(weights[scores.index(max(scores))])
        chosen = SimpleNamespace(epoch=scores.index(max(scores)) + 1) if scores else None
        return SimpleNamespace(best=chosen, stopped=None, epochs=[SimpleNamespace(losses=None)])

    def evaluate(self, loader: Any, metrics: Any = None) -> dict[str, float]:
        return evaluate(self.model, loader, metrics)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, metrics: Any = None) -> dict[str, float]:
    """The means of metrics that give a value for each item."""
    was_training = model.training
    model.eval()
    values: dict[str, list[Tensor]] = {name: [] for name in metrics or {}}
    for x, y in loader:
        output = model(x)
        for name, metric in (metrics or {}).items():
            values[name].append(metric(output, y).float())
    model.train(was_training)
    return {name: float(torch.cat(each).mean()) for name, each in values.items()}


class Average:
    """An exponential moving average of the weights by hand: it begins with those of the first step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.steps = copy.deepcopy(model), decay, 0

    @torch.no_grad()
    def __call__(self, record: Any) -> None:
        share = 1 - self.decay if self.steps else 1.0
        for mean, weight in zip(self.model.parameters(), record.model.parameters(), strict=True):
            mean.lerp_(weight, share)
        self.steps += 1


def warm_up_and_cosine(optimizer: torch.optim.Optimizer, steps: int, warmup: int) -> LRScheduler:
    parts = [LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup), CosineAnnealingLR(optimizer, steps - warmup)]
    return SequentialLR(optimizer, parts, milestones=[warmup])


TUTORIAL = SimpleNamespace(
    WarmupCosine=warm_up_and_cosine,
    Loop=TutorialLoop,
    Ema=Average,
    evaluate=evaluate,
    metrics=hotloop.metrics,
    pad_to=lambda length, values: None,
    seed=torch.manual_seed,
)


def twin_of(title: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same recipe in plain PyTorch."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "hotloop", TUTORIAL)
        return run(title)


def modules_in(names: dict[str, Any]) -> dict[str, nn.Module]:
    modules = {name: value for name, value in names.items() if isinstance(value, nn.Module)}
    return modules | ({"ema": names["ema"].model} if "ema" in names else {})


def test_there_are_fifteen_short_recipes_and_each_has_its_purpose_and_its_limits() -> None:
    assert len(SECTIONS) == 15
    for title, section in SECTIONS.items():
        before, code, after = FENCE.split(section.strip())
        assert before.strip(), f"{title}: what for"
        assert after.strip(), f"{title}: limits"
        assert 8 <= len([line for line in code.splitlines() if line.strip()]) <= 25, title


@pytest.mark.usefixtures("nothing_rounds")
@pytest.mark.parametrize("title", SECTIONS)
def test_a_recipe_runs_and_trains_as_the_loop_by_hand(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = run(title)
    drawn = torch.get_rng_state()
    theirs = twin_of(title, monkeypatch)
    assert torch.equal(drawn, torch.get_rng_state()), "both have drawn the same random numbers"
    assert ours["loop"].steps == theirs["loop"].steps > 0
    modules, twins = modules_in(ours), modules_in(theirs)
    assert "model" in modules
    assert modules.keys() == twins.keys()
    for name, module in modules.items():
        torch.testing.assert_close(module.state_dict(), twins[name].state_dict(), rtol=1e-5, atol=1e-6)


def test_the_average_is_not_the_last_weights() -> None:
    names = run("EMA")
    assert not torch.allclose(names["ema"].model[0].weight, names["model"][0].weight)


def test_early_stopping_finds_the_epoch_that_a_loop_by_hand_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "Early stopping and the best weights"
    report = run(title)["report"]
    assert report.stopped == "no better accuracy in 2 epochs"
    assert report.best.epoch == twin_of(title, monkeypatch)["report"].best.epoch < len(report.epochs)


def test_accumulation_warns_of_a_contrastive_loss_and_micro_batches_are_refused() -> None:
    title = "Contrastive loss"
    with pytest.warns(PlanWarning, match="the losses of its batches, which is not the loss of all"):
        run(title, lambda code: code.replace("objective=info_nce", "objective=info_nce, accumulate=4"))
    plan = 'objective=info_nce, plan=hotloop.Plan("cpu", micro_batch=4)'
    with pytest.raises(BadArgument, match="the loss is not that of its micro-batches"):
        run(title, lambda code: code.replace("objective=info_nce", plan))


@pytest.mark.parametrize(
    ("title", "names"), [("Distillation", ["labels", "teacher"]), ("Several tasks", ["brightness", "kind"])]
)
def test_named_losses_are_reported(title: str, names: list[str]) -> None:
    assert sorted(run(title)["report"].epochs[-1].losses) == names


def test_lora_saves_its_own_weights_alone_and_changes_no_others() -> None:
    names = run("LoRA by hand")
    saved = torch.load("lora.pt")
    assert sorted(saved) == ["3.down", "3.up"]
    assert saved["3.up"].count_nonzero() > 0
    before = run("LoRA by hand", lambda code: code.replace("epochs=2", "epochs=1"))["model"]
    assert torch.equal(names["model"][3].layer.weight, before[3].layer.weight)


def test_the_body_is_frozen_for_two_epochs_and_trained_afterwards() -> None:
    title = "Fine-tuning: frozen first, unfrozen later"
    weights = [
        run(title, lambda code, n=n: code.replace("epochs=4", f"epochs={n}"))["body"].weight  # type: ignore[misc]
        for n in (1, 2, 3)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_a_picture_for_each_epoch() -> None:
    run("Pictures after each epoch")
    pictures = [Path(f"epoch-{number}.png").read_bytes() for number in (1, 2, 3)]
    assert len(set(pictures)) == 3


def test_the_rates_are_those_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "Clipping, warm-up and cosine"
    rates = run(title)["rates"]
    assert rates == pytest.approx(twin_of(title, monkeypatch)["rates"])
    assert max(rates) == rates[3] == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
