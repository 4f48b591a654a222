"""`run_demo`: sprites from nothing to a page. Make them, learn to sort them, learn to draw new ones, judge those."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hotloop.apps.sprites.confusion import confusion
from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.making import CLASSES, make
from hotloop.apps.sprites.network_files import TrainedNetwork
from hotloop.apps.sprites.pictures import png_of, sheet_of
from hotloop.apps.sprites.quality import DrawerScores, confusions, drawn_by, judge
from hotloop.apps.sprites.recipes import Recipe, learn_to_draw, learn_to_sort, recipe_for, sprites_for
from hotloop.device import Choice, pick
from hotloop.errors import BadArgument
from hotloop.printing.text import count, duration, plural
from hotloop.records import Report
from hotloop.report.document import Fact, Gallery, Picture
from hotloop.report.plots import DARK, LIGHT
from hotloop.report.runs import DATA, PAGE, Run, RunFolder, new_run
from hotloop.report.training_page import figures_of, page

ON_A_CPU = ("ghost", "sword", "potion", "heart", "tree", "mushroom", "ship", "fish")  # what two minutes can teach it
HELD_OUT = 1_000_003  # added to the seed for sprites that no network learns from

Tell = Callable[[str], None]


@dataclass(frozen=True)
class DemoSettings:
    """What the demo does on a device; `effort` scales how long it trains."""

    classes: tuple[str, ...]
    sprites: int
    sort: Recipe
    draw: Recipe
    seed: int
    effort: float
    shown: int  # sprites of each class in a sheet
    judged: int
    temperature: float  # of the drawing: a network that has learned little draws better when it dares less

    @classmethod
    def of(cls, device: torch.device, seed: int, effort: float) -> "DemoSettings":
        if not 0 < effort <= 100:
            raise BadArgument(f"effort {effort}", fix="give --effort a number above 0, at most 100")
        on_cpu = device.type == "cpu"
        sort, draw = recipe_for("classify", device), recipe_for("draw", device)
        if on_cpu:  # sorting is cheap: of few sprites it can see each one more often
            sort, draw = replace(sort, epochs=max(1, min(4, round(1 / effort)))), replace(draw, epochs=2)
        sprites = round((5632 if on_cpu else sprites_for(device)) * effort)
        return cls(
            classes=ON_A_CPU if on_cpu else CLASSES,
            sprites=max(sprites, 256),
            sort=replace(sort, seed=seed),
            draw=replace(draw, seed=seed),
            seed=seed,
            effort=effort,
            shown=12 if effort >= 0.2 else 4,
            judged=64 if on_cpu else 2048,
            temperature=0.5 if on_cpu else 0.8,
        )


@dataclass
class Demo:
    """A demo and what it has to show; what Ctrl-C kept from being done is None."""

    settings: DemoSettings
    choice: Choice
    folder: RunFolder
    tell: Tell
    sorting: Report | None = None
    accuracy: float | None = None
    drawing: Report | None = None
    verdict: DrawerScores | None = None
    sheets: list[Picture] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        return any(report.interrupted for report in (self.sorting, self.drawing) if report)

    def to_json(self) -> dict[str, Any]:
        return {
            "device": str(self.choice.device),
            "reason": self.choice.reason,
            "interrupted": self.interrupted,
            "classes": list(self.settings.classes),
            "sprites": self.settings.sprites,
            "seed": self.settings.seed,
            "accuracy": self.accuracy,
            "verdict": self.verdict.to_json() if self.verdict else None,
            "classifier": self.sorting.to_json() if self.sorting else None,
            "drawer": self.drawing.to_json() if self.drawing else None,
        }

    def run(self) -> None:
        settings, choice = self.settings, self.choice
        sprites = make(settings.sprites, seed=settings.seed, classes=settings.classes)
        held_out = make(1024, seed=settings.seed + HELD_OUT, classes=settings.classes)
        self._show("sprites.png", sprites, "What they learn from: made by rules, a row for each class")

        kinds = plural(len(sprites.classes), "class", "classes")
        self.tell(f"Learning to sort {plural(len(sprites), 'sprite')} of {kinds}")
        sorter, self.sorting = learn_to_sort(sprites, held_out, settings.sort, device=choice)
        self.folder.write("classifier.safetensors", sorter.to_bytes())
        table = confusions(sorter, held_out, choice.device)
        self.accuracy = table.diagonal().sum().item() / table.sum().item()
        light, dark = (confusion(table.tolist(), held_out.classes, theme) for theme in (LIGHT, DARK))
        self.folder.write("confusion.png", light)

        if not self.sorting.interrupted:
            self.tell("Learning to draw new ones")
            drawer, self.drawing = learn_to_draw(sprites, settings.draw, device=choice)
            self.folder.write("drawer.safetensors", drawer.to_bytes())
            self._judge(drawer, sorter, sprites)
        words = "rows: what it is; columns: what it was taken for"
        self._write(Picture(light, words, "the confusions as a matrix", dark=dark))

    def _judge(self, drawer: TrainedNetwork, sorter: TrainedNetwork, sprites: SpriteSet) -> None:
        settings, where = self.settings, self.choice.device
        self.tell("Drawing, and judging what was drawn")
        kinds = len(settings.classes)
        each = max(settings.shown, settings.judged // kinds if settings.shown > 4 else 0)
        labels = torch.arange(kinds).repeat_interleave(each)
        drawn = drawn_by(drawer, labels, where, seed=settings.seed, temperature=settings.temperature)
        self.verdict = judge(drawn, sorter, sprites, where)
        self._show("drawn.png", drawn, "What it draws: sprites that the network made up")

    def _show(self, name: str, sprites: SpriteSet, caption: str) -> None:
        """A contact sheet, as a file and for the page."""
        shown = self.settings.shown
        png = png_of(sheet_of(sprites.rows(shown), shown))
        self.folder.write(name, png)
        self.sheets.insert(0, Picture(png, caption, ", ".join(sprites.classes), crisp=True))

    def _write(self, confused: Picture) -> None:
        """The page and the data."""
        reports = {"sorting sprites": self.sorting, "drawing sprites": self.drawing}
        names = self.settings.classes
        lead = (
            f"Two networks learned from {count(self.settings.sprites)} sprites of {len(names)} classes, "
            "made by rules: one sorts sprites, the other draws new ones. Both were judged on what they had never seen."
        )
        html = page(
            {name: report for name, report in reports.items() if report},
            title="Sprites, sorted and drawn",
            lead=lead,
            headlines=headlines(self),
            galleries=[Gallery("Sprites", self.sheets), Gallery("What the classifier confuses", [confused])],
            command=command(self),
        )
        self.folder.write(PAGE, html)
        self.folder.write_json(DATA, run_of(self).with_data(self.to_json()))


def run_demo(
    out: Path | None = None,
    *,
    device: str | None = None,
    seed: int = 0,
    effort: float = 1.0,
    tell: Tell = lambda words: None,
) -> Demo:
    """Make sprites, train both networks, judge them, and write a folder with a page, pictures and the networks.

    `tell` hears what begins. Ctrl-C ends the training that is running; the folder then holds what was done up to there.
    """
    choice = pick(device)
    settings = DemoSettings.of(choice.device, seed, effort)
    tell(f"{choice.device} in {choice.precision}: {choice.reason}")
    with new_run(out) as folder:
        demo = Demo(settings, choice, folder, tell)
        demo.run()
    return demo


def run_of(demo: Demo) -> Run:
    """The entry of a demo among the runs."""
    figures = {"sorted right, accuracy": demo.accuracy}
    if demo.verdict:
        figures["drawn as the class asked for, accuracy"] = demo.verdict.right
    for name, report in (("sorting", demo.sorting), ("drawing", demo.drawing)):
        if report is not None:
            figures |= figures_of(report, f"{name}: ")
    known = {name: value for name, value in figures.items() if value is not None}
    begun = demo.sorting or demo.drawing
    device = demo.choice.name or str(demo.choice.device)
    return Run("demo", "sprites, sorted and drawn", begun.started if begun else "", device, known)


def headlines(demo: Demo) -> list[Fact]:
    """The numbers that a person looks for first."""
    facts = []
    if demo.verdict:
        detail = f"of {count(demo.verdict.drawn)}, in the eyes of the classifier"
        facts.append(Fact("drawn as the class asked for", f"{demo.verdict.right:.1%}", detail))
        copies = demo.verdict.copies
        facts.append(Fact("exact copies", "unknown" if copies is None else f"{copies:.1%}", "of training sprites"))
    if demo.accuracy is not None:
        facts.append(Fact("sorted right", f"{demo.accuracy:.1%}", "of sprites it never saw"))
    seconds = sum(report.seconds for report in (demo.sorting, demo.drawing) if report)
    facts.append(Fact("training", duration(seconds), "both networks"))
    facts.append(Fact("device", str(demo.choice.device), demo.choice.name or "unknown"))
    return facts


def command(demo: Demo) -> str:
    """The command that does this run again."""
    settings = demo.settings
    effort = [] if settings.effort == 1 else ["--effort", f"{settings.effort:g}"]
    return shlex.join(["hotloop", "demo", "--device", str(demo.choice.device), "--seed", str(settings.seed), *effort])
