"""Does the default train as well as fp32 eager? Four trainings with several seeds, `plan="auto"` and `plan="plain"`.

    python benchmarks/convergence.py --out benchmarks/results/convergence.json

Both plans of a seed begin with the same weights and see the same batches. After the run both models are validated by
the same fp32 code. The difference of the means must lie within the spread of the seeds: the wider max - min of the two
plans, where the default's counts for at most three times that of fp32, so that a seed that diverges is no excuse. Two
plans that are equal fail 6% of the comparisons with three seeds, and 0.3% with five.
"""

import argparse
import importlib
import importlib.util
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import hotloop
from harness.about import facts
from harness.models import GPT, GPTSize, ResNet18
from harness.switches import OwnSwitches
from harness.workloads.reference import next_token
from hotloop.apps.sprites.drawing import guess_hidden
from hotloop.apps.sprites.making import CLASSES, make
from hotloop.apps.sprites.models import MASK, Classifier, Drawer, Size
from hotloop.device.clock import synchronize
from hotloop.records.files import write_json

ROOT = Path(__file__).resolve().parents[1]
PLANS = ("plain", "auto")
HIDDEN = -100  # a target that does not count
WIDEST = 3  # times the spread of fp32 that the default's own spread may excuse
LEAST = {"loss": 0.0, "accuracy": 0.001}  # differences below are no differences
HELD_OUT_SEED = 1_000_003  # of sprites that nothing is trained on


@dataclass(frozen=True)
class Task:
    """A training: its network, what it learns from, and what it is validated on."""

    network: Callable[[], nn.Module]
    optimize: Callable[..., Optimizer]
    rate: float  # the highest of the one-cycle schedule
    goal: dict[str, Any]  # `loss` or `objective` of the Loop
    data: TensorDataset
    held_out: TensorDataset  # inputs, and the targets last
    scores: Callable[[nn.Module, Sequence[Tensor]], Tensor]  # with the classes in the second dimension
    batch: int
    epochs: int
    about: str


@dataclass(frozen=True)
class Run:
    """One training from its first step to its validation."""

    task: str
    plan: str
    seed: int
    loss: float  # on held-out data, as is the accuracy
    accuracy: float
    seconds: float  # of `Loop(…)` and `fit` together
    steps: int
    levers: tuple[str, ...]  # at the end
    changed_at: tuple[int, ...]  # steps at which another plan was taken


@dataclass(frozen=True)
class Comparison:
    """A figure of both plans over all seeds."""

    task: str
    figure: str
    plain: float  # means
    auto: float
    plain_spread: float  # max - min
    auto_spread: float

    @property
    def difference(self) -> float:
        return self.auto - self.plain

    @property
    def allowed(self) -> float:
        own = min(self.auto_spread, WIDEST * self.plain_spread)
        return max(self.plain_spread, own, LEAST[self.figure])

    @property
    def is_within(self) -> bool:
        return math.isfinite(self.difference) and abs(self.difference) <= self.allowed


def sprite_classifier(quick: bool) -> Task:
    count, batch, width = (768, 32, 6) if quick else (8_192, 256, 48)
    sprites, held_out = make(count, seed=0), make(1_024 if quick else 8_192, seed=HELD_OUT_SEED)
    return Task(
        network=partial(Classifier, Size(len(CLASSES), width)),
        optimize=partial(AdamW, weight_decay=0.01),
        rate=4e-3 if quick else 2e-3,
        goal={"loss": nn.CrossEntropyLoss(label_smoothing=0.05)},
        data=sprites.dataset(),
        held_out=held_out.dataset(),
        scores=_scores,
        batch=batch,
        epochs=3 if quick else 24,
        about=f"{count:,} sprites, {width} wide",
    )


def sprite_generator(quick: bool) -> Task:
    """Half of the pixels of a held-out sprite are hidden, the same ones for every model, and must be guessed."""
    count, batch, width = (512, 16, 6) if quick else (16_384, 256, 48)
    sprites, held_out = make(count, seed=0), make(512 if quick else 4_096, seed=HELD_OUT_SEED)
    hidden = torch.rand(held_out.pixels.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return Task(
        network=partial(Drawer, Size(len(CLASSES), width)),
        optimize=partial(AdamW, weight_decay=0.01),
        rate=3e-3 if quick else 2e-3,
        goal={"objective": guess_hidden},
        data=sprites.dataset(),
        held_out=TensorDataset(
            held_out.pixels.masked_fill(hidden, MASK),
            held_out.labels,
            held_out.pixels.long().masked_fill(~hidden, HIDDEN),
        ),
        scores=_scores,
        batch=batch,
        epochs=2 if quick else 5,
        about=f"{count:,} sprites, {width} wide",
    )


def resnet18(quick: bool) -> Task:
    images, labels, name = _digits() if importlib.util.find_spec("sklearn") else _few_sprites()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    few, width, batch = len(images) // 5, 4 if quick else 64, 64 if quick else 128
    return Task(
        network=partial(ResNet18, classes=int(labels.max()) + 1, width=width),
        optimize=partial(SGD, momentum=0.9, weight_decay=5e-4),
        rate=0.1 if quick else 0.05,
        goal={"loss": nn.CrossEntropyLoss()},
        data=TensorDataset(images[few:], labels[few:]),
        held_out=TensorDataset(images[:few], labels[:few]),
        scores=_scores,
        batch=batch,
        epochs=3 if quick else 40,
        about=f"{len(images) - few:,} images: {name}, {width} wide",
    )


def gpt(quick: bool) -> Task:
    """Characters of this project's documentation; of every ten windows of text the last is held out."""
    text = "".join(
        file.read_text(encoding="utf-8") for file in (*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md")
    )
    text = text[:100_000] if quick else text
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    size = GPTSize(2, 2, 32, 32, len(letters)) if quick else GPTSize(4, 4, 128, 128, len(letters))
    windows = torch.tensor([letters[letter] for letter in text]).unfold(0, size.context + 1, size.context)
    is_held_out = torch.arange(len(windows)) % 10 == 9
    # Lines of dashes and the like come again, and what is trained on is not held out.
    trained = {tuple(row.tolist()) for row in windows[~is_held_out, :-1]}
    is_new = torch.tensor(
        [not held or tuple(row.tolist()) not in trained for row, held in zip(windows[:, :-1], is_held_out, strict=True)]
    )
    windows, is_held_out = windows[is_new], is_held_out[is_new]
    inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    return Task(
        network=partial(GPT, size),
        optimize=partial(AdamW, weight_decay=0.1, betas=(0.9, 0.95)),
        rate=6e-3 if quick else 2e-3,
        goal={"objective": next_token},
        data=TensorDataset(inputs[~is_held_out], targets[~is_held_out]),
        held_out=TensorDataset(inputs[is_held_out], targets[is_held_out]),
        scores=lambda model, inputs: model(*inputs).transpose(1, 2),
        batch=16 if quick else 64,
        epochs=2 if quick else 20,
        about=f"{len(text):,} characters, {size.layers} layers, {size.width} wide",
    )


TASKS: dict[str, Callable[[bool], Task]] = {
    "sprite-classifier": sprite_classifier,
    "sprite-generator": sprite_generator,
    "resnet18": resnet18,
    "gpt": gpt,
}


def _scores(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    scores: Tensor = model(*inputs)
    return scores


def _digits() -> tuple[Tensor, Tensor, str]:
    digits = importlib.import_module("sklearn.datasets").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(8).sub(1)
    return images[:, None].expand(-1, 3, -1, -1).contiguous(), torch.tensor(digits.target), "scikit-learn's digits"


def _few_sprites() -> tuple[Tensor, Tensor, str]:
    """As many sprites as there are digits, in colour; few, so that not all of the others are recognised."""
    sprites = make(1_797, seed=0)
    colours = sprites.palette[:, :3].float().div(127.5).sub(1)
    return colours[sprites.pixels.long()].permute(0, 3, 1, 2).contiguous(), sprites.labels, "sprites"


def train(name: str, task: Task, plan: str, seed: int, device: torch.device) -> Run:
    """One training, whose wall clock begins when the model and its data are there."""
    torch.manual_seed(seed)
    model = task.network()
    optimizer = task.optimize(model.parameters(), lr=task.rate)
    order = RandomSampler(task.data, generator=torch.Generator().manual_seed(seed))
    loader = DataLoader(task.data, batch_size=None, sampler=BatchSampler(order, task.batch, drop_last=True))
    schedule = OneCycleLR(
        optimizer, task.rate, total_steps=task.epochs * len(loader), pct_start=0.2, cycle_momentum=False
    )
    with OwnSwitches(device).turn():
        synchronize(device)
        start = time.perf_counter()
        loop = hotloop.Loop(model, optimizer, device=device, clip_norm=1.0, scheduler=schedule, plan=plan, **task.goal)
        report = loop.fit(loader, epochs=task.epochs, progress=False)
        synchronize(device)
        seconds = time.perf_counter() - start
    if report.interrupted:  # Ctrl-C, which `fit` takes as the wish to end with a report
        raise KeyboardInterrupt
    loss, accuracy = validate(task, model, device)
    changed_at = tuple(change.step for change in report.plans[1:])
    return Run(name, plan, seed, loss, accuracy, seconds, report.steps, report.levers, changed_at)


@torch.inference_mode()
def validate(task: Task, model: nn.Module, device: torch.device) -> tuple[float, float]:
    """The mean loss and the accuracy on held-out data, in fp32."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in DataLoader(task.held_out, 256):
        *inputs, targets = hotloop.move(batch, device)
        scores = task.scores(model, inputs)
        counted = targets != HIDDEN
        loss = F.cross_entropy(scores, targets, reduction="sum", ignore_index=HIDDEN)
        right = ((scores.argmax(1) == targets) & counted).sum()
        totals += torch.stack([loss, right, counted.sum()]).double().cpu()
    loss, right, count = totals.tolist()
    return loss / count, right / count


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Each figure of each task, over all seeds."""
    found = []
    for task in dict.fromkeys(run.task for run in runs):
        for figure in LEAST:
            plain, auto = (
                [getattr(run, figure) for run in runs if run.task == task and run.plan == plan] for plan in PLANS
            )
            means, spreads = (
                [statistics.fmean(each) for each in (plain, auto)],
                [_range(each) for each in (plain, auto)],
            )
            found.append(Comparison(task, figure, *means, *spreads))
    return found


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def tables(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> list[Table]:
    learned = Table(title="held-out figures: mean over the seeds (max - min)")
    for column in ("training", "figure", 'plan="plain"', "default", "difference", "allowed", "within"):
        learned.add_column(column, justify="left" if column in ("training", "figure") else "right")
    for each in comparisons:
        learned.add_row(
            each.task,
            each.figure,
            f"{each.plain:.4f} ({each.plain_spread:.4f})",
            f"{each.auto:.4f} ({each.auto_spread:.4f})",
            f"{each.difference:+.4f}",
            f"{each.allowed:.4f}",
            "yes" if each.is_within else "NO",
        )
    taken = Table(title="wall clock: median over the seeds")
    for column in (
        "training",
        "steps",
        'plan="plain"',
        "default",
        "times",
        "the default's plan at the end",
        "from step",
    ):
        taken.add_column(column, justify="left" if column in ("training", "the default's plan at the end") else "right")
    for task in dict.fromkeys(run.task for run in runs):
        plain, auto = ([run for run in runs if run.task == task and run.plan == plan] for plan in PLANS)
        before, after = (statistics.median(run.seconds for run in each) for each in (plain, auto))
        taken.add_row(
            task,
            f"{plain[0].steps:,}",
            f"{before:.2f} s",
            f"{after:.2f} s",
            f"{before / after:.2f}",
            "; ".join(dict.fromkeys(", ".join(run.levers) or "as plain" for run in auto)),
            ", ".join(dict.fromkeys(str(run.changed_at[-1]) if run.changed_at else "–" for run in auto)),
        )
    return [learned, taken]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all where none is named")
    parser.add_argument("--quick", action="store_true", help="small networks and short runs, for a CPU")
    parser.add_argument("--seeds", type=int, default=3, help="how many, 2 at least; 3 where nothing is said")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every run and comparison here, as JSON")
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks) - set(TASKS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose of {', '.join(TASKS)}")
    if arguments.seeds < 2:
        parser.error("one seed has no spread; give 2 or more")
    device = hotloop.pick().device
    runs: list[Run] = []
    tasks: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in arguments.tasks or TASKS:
            task = TASKS[name](arguments.quick)
            tasks[name] = f"{task.about}, {task.epochs} epochs in batches of {task.batch}"
            print(f"{name}: {tasks[name]}", flush=True)
            for seed in range(arguments.seeds):
                # By turns first, so that what only the first run of a process pays for falls on both.
                for plan in PLANS if seed % 2 == 0 else PLANS[::-1]:
                    os.environ["HOTLOOP_CACHE"] = str(Path(cache, str(len(runs))))  # nothing is known beforehand
                    runs.append(run := train(name, task, plan, seed, device))
                    print(
                        f"  seed {seed}, {plan}: loss {run.loss:.4f}, accuracy {run.accuracy:.2%}, {run.seconds:.2f} s;"
                        f" {', '.join(run.levers) or 'as plain'}",
                        flush=True,
                    )
    comparisons = compare(runs)
    console = Console(width=140)
    for table in tables(runs, comparisons):
        console.print(table)
    if arguments.out:
        judged = [
            {**asdict(each), "difference": each.difference, "allowed": each.allowed, "within": each.is_within}
            for each in comparisons
        ]
        found = {"tasks": tasks, "comparisons": judged, "runs": [asdict(run) for run in runs]}
        write_json(arguments.out, facts([device]) | found)
    return 0 if all(each.is_within for each in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
