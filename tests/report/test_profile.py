"""The page and the short answer of a profile."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from hotloop.printing.text import duration
from hotloop.profiling.profile_record import Line, Profile
from hotloop.report.profile_page import (
    always_there,
    headlines,
    lead,
    parts_table,
    profile_page,
    profile_run,
    profile_summary,
)

from .profiles import made_profile

DEVICES = ("cuda:0", "cpu")


class Text(HTMLParser):
    """What a page says, and the names of its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.said: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    def __str__(self) -> str:
        return " ".join(" ".join(self.said).split())


def shown(profile: Profile, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(profile_summary(profile))
    return console.file.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_the_page_answers_in_order(device: str) -> None:
    page = str(Text(profile_page(made_profile(device), command="hotloop profile train.py")))
    headings = [
        "Where a step of train.py spends its time",
        "Where a step's time went",
        "What to do about it",
        "How far the computing is from the device's ceilings",
        "The costliest operations",
        "What the host waited for",
        "Memory over a step",
        "How it was measured",
    ]
    places = [page.index(heading) for heading in headings]
    assert places == sorted(places)
    assert "hotloop profile train.py" in page


def test_the_figures_of_a_gpu_are_those_of_its_timeline() -> None:
    profile = made_profile("cuda:0")
    assert profile.median == pytest.approx(0.020)
    parts = made_profile("cuda:0", steps=1).parts
    assert parts.compute == pytest.approx(0.003 + 0.0004 + 0.0057 + 0.001)
    assert parts.copies == pytest.approx(0.0012)
    assert parts.data == pytest.approx(0.005)
    assert parts.waits == pytest.approx(0.0194 - 0.0182 - 0.0001)
    page = str(Text(profile_page(profile)))
    assert "/project/net.py:11 mm, backward 784×64, 64×512 5.7 ms" in page
    assert "/project/train.py:26 .item() or a branch on a tensor 4.7 ms 1" in page
    assert "The loop waits 32% of its time for data." in page  # 42 of 132 ms


def test_ceilings_are_of_the_precision_that_was_used() -> None:
    profile = made_profile("cuda:0")
    assert profile.ceiling == 40e12
    mixed = replace(profile, flops={"fp32": 40e12, "bf16": 600e12})
    assert mixed.ceiling == pytest.approx(640e12 / 2)  # a second each
    assert replace(profile, ceilings={}).ceiling is None


def test_what_is_unknown_says_so() -> None:
    profile = replace(
        made_profile("cpu"), data_known=False, flops={}, ceilings={}, memory=(), operations=(), waits=(), plain=None
    )
    page = str(Text(profile_page(profile)))
    assert "no DataLoader was seen" in page
    assert "waiting for data no DataLoader was seen: it is among the gaps unknown unknown" in page
    assert "Unknown: the run ended before a step could be looked at." in page
    assert "Nothing: no line reads a value" in page


def test_nothing_from_outside_becomes_markup() -> None:
    evil = '<script>alert("x")</script>\x1b[2J'
    profile = made_profile(name=evil)
    operation = replace(profile.operations[0], name=evil, line=Line(evil, 3, evil), shapes=evil)
    wait = replace(profile.waits[0], what=evil, line=Line(evil, 3, evil))
    advice = replace(profile.advice[0], what=evil, fix=evil)
    profile = replace(
        profile, operations=(operation,), waits=(wait,), advice=(advice,), notes=(evil,), device_name=evil
    )
    page = profile_page(profile, command=evil)
    assert "script" not in Text(page).tags
    assert "<script" not in page
    assert "\x1b" not in shown(profile)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = profile_page(made_profile())
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href|srcset)="', page)
    (picture,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert ElementTree.fromstring(picture).findall("path")  # noqa: S314  # our own
    places = [float(number) for path in re.findall(r' d="M([^"]*)"', picture) for number in re.split("[L ]", path)]
    assert 0 <= min(places) <= max(places) <= 1000
    for words in ("activations", "forward", "backward", "alive, in MiB"):
        assert words in page


def test_the_terminal_says_the_same() -> None:
    said = shown(made_profile("cuda:0"))
    assert "A step takes 22 ms on cuda:0, the mean of 6 steps; the largest part of it, 46%, is compute." in said
    assert "waiting for data" in said
    assert "█" in said
    assert "/project/net.py:11" in said
    assert "fix: " in said


def test_memory_that_is_always_there_does_not_press_the_rest_flat() -> None:
    profile = made_profile()
    assert always_there(profile) == 0
    data = replace(profile, memory=tuple(replace(m, other=m.other + 10**8) for m in profile.memory))
    assert always_there(data) == 10**8 + 200_000


def test_the_first_numbers() -> None:
    facts = {fact.label: fact.value for fact in headlines(made_profile("cuda:0"))}
    assert facts["a step, the mean"] == "22 ms"  # 132 ms in six steps
    assert facts["steps profiled"] == "6"
    assert facts["of what the device can compute"].endswith("%")


def test_two_profiles_can_be_compared() -> None:
    run = profile_run(made_profile())
    assert (run.kind, run.title) == ("profile", "train.py")
    assert run.figures["median step in seconds"] == pytest.approx(0.02)
    parts = [value for name, value in run.figures.items() if name.endswith("in a step, in seconds")]
    assert sum(parts) == pytest.approx(run.figures["mean step in seconds"])
    assert run.figures["compute in a step, in seconds"] > 0
    assert all(name.endswith(("seconds", "bytes")) for name in run.figures), "so that less is known to be better"


@pytest.mark.parametrize("device", DEVICES)
def test_the_parts_add_up_to_the_step_that_is_told(device: str) -> None:
    profile = made_profile(device)
    assert sum(profile.parts.shares.values()) == pytest.approx(1)
    assert profile.parts.total == pytest.approx(sum(profile.seconds))
    *parts, whole = parts_table(profile)
    assert whole[-1] == duration(profile.mean) == headlines(profile)[0].value
    assert f"A step takes {whole[-1]} on {device}, the mean of 6 steps" in lead(profile)
    assert sum(profile.parts.seconds.values()) / profile.steps == pytest.approx(profile.mean)
    assert len(parts) >= 3


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_keeps_the_numbers(width: int) -> None:
    profile = made_profile()
    long = Line("a/project/in/a/deep/folder/network_definition.py", 111, "x = self.attention(self.norm(x), mask=mask)")
    operations = tuple(replace(o, line=long, name=20 * "operation") for o in profile.operations)
    terminal = Console(width=width, record=True, file=StringIO())
    terminal.print(profile_summary(replace(profile, operations=operations)))
    lines = terminal.export_text().splitlines()
    assert max(map(len, lines)) <= width
    for operation in operations[:5]:
        numbers = [f"{operation.share:.1%}", *duration(operation.seconds).split()]
        assert any(line.split()[:3] == numbers for line in lines)
    for label_, _, share, seconds in parts_table(profile):
        assert any(line.startswith(label_) and line.rstrip().endswith(seconds) and share in line for line in lines)
    assert width < 80 or sum("network_definition.py:111" in line for line in lines) == 5
