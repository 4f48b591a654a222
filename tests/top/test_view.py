"""The screen and the lines as a function of what was read: all has its place, and nothing breaks out of it."""

import io
import json
import math
import unicodedata
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hotloop.apps.top import live
from hotloop.apps.top.advice import Advice
from hotloop.apps.top.example import GIB, machine
from hotloop.apps.top.view import screen
from hotloop.monitor.reading import Gpu, Host, Process, Reading

from ..thorough import tries
from .pretend import NAME, NASTY, ODD, READINGS, terminal

ADVICE = Advice("idle-memory", 0, "4.1 GiB is held by python3 (PID 7), idle for 12 min", "end it with `kill 7`")


def drawn(reading: Reading, advice: tuple[Advice, ...] = (), width: int = 80, me: str | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(screen(reading, advice, me))
    text = out.getvalue()
    for line in text.split("\n"):
        assert not any(unicodedata.category(char)[0] == "C" for char in line), repr(line)
        assert line.splitlines() in ([], [line]), repr(line)
    return text


def test_what_a_standard_terminal_shows() -> None:
    read = machine(start=1_000_000_000.0)
    *_, reading = (read() for _ in range(61))
    text = drawn(reading, (ADVICE, replace(ADVICE, words="no fix", fix=None)))
    for word in (
        *("hotloop top · workstation · driver 580.95.05", "GPU 0 NVIDIA H200", "utilisation", "85%", "65 °C", "fan –"),
        *("622 of 700 W", "1,755 of 1,980 MHz", "64.0 of 141.0 GiB", "PCIe ↓ 1.2 GiB/s ↑ 39.1 MiB/s"),
        *("throttled: power cap", "26% of 32 cores", "71.5 of 251.0 GiB", "disk ↓ 202.2 MiB/s", "net ↓ 1.1 MiB/s"),
        *("4 processes", "57.3 GiB", "104%", "3 h 8 m", "python train.py", "20416", "━━━"),
    ):
        assert word in text, word
    rows = text.splitlines()
    [place] = [row for row, line in enumerate(rows) if line.startswith(" !  4.1 GiB is held")]
    assert "fix: end it with `kill 7`" in rows[place + 1]
    assert text.count("fix:") == 1
    assert all(len(line) <= 80 for line in rows)
    assert drawn(machine(16)()).count("NVIDIA H200") == 16


def test_without_a_gpu_it_says_why_and_what_is_not_known_is_a_dash_and_never_a_number() -> None:
    why = "no NVIDIA GPU can be read: there is no driver"
    told = drawn(Reading(0.0, Host(cpu=12.0, cores=4), notes=(why,)))
    assert told.count(why) == 1
    assert "12% of 4 cores" in told
    assert "hotloop device" in drawn(Reading(0.0, Host()))
    reading = Reading(0.0, Host(), (Gpu(0, "H", processes=(Process(7, None, "compute"),)),))
    told = drawn(reading).split("\n", 1)[1].replace("GPU 0", "GPU").replace("1 process", "process")
    assert [char for char in told if char.isdigit()] == ["7", "0"], "a PID and the index of its GPU"
    assert "not visible from here" in told
    assert "does not tell" in drawn(Reading(0.0, Host(), (Gpu(0, "H200"),)))
    assert "No process" in drawn(Reading(0.0, Host(), (Gpu(0, "H200", processes=()),)))
    told = drawn(Reading(0.0, Host(), (Gpu(0, "H200", error="GPU is lost"), Gpu(1, "H200", ecc_uncorrected=3))))
    assert "GPU 0 H200 · GPU is lost" in told
    assert "3 uncorrected ECC errors" in told


def test_yours_come_first_and_are_marked_then_by_memory() -> None:
    people = [
        Process(10, GIB, "compute", "a", "a", "ada"),
        Process(20, 4 * GIB, "compute", "b", "b", "漢字かな"),
        Process(30, 2 * GIB, "compute", "c", "c", "zoe"),
    ]
    for shown, me in ((people, "zoe"), ([*people[:2], replace(people[2], ours=True)], None)):
        text = drawn(Reading(0.0, Host(), (Gpu(0, "H200", processes=tuple(shown)),)), me=me)
        rows = [line.split() for line in text.splitlines() if "GiB" in line and "–" in line and "memory" not in line]
        assert [row[0] if row[0] != "▸" else row[1] for row in rows] == ["30", "20", "10"]
        assert rows[0][0] == "▸"
        assert "▸ yours" in text


advices = st.lists(st.builds(Advice, NAME, st.none() | st.integers(), NAME, ODD), max_size=4).map(tuple)


@settings(max_examples=tries(30, 100), deadline=None)
@given(READINGS, advices, st.integers(20, 300), ODD)
def test_whatever_is_read_steers_nothing(
    reading: Reading, advice: tuple[Advice, ...], width: int, me: str | None
) -> None:
    drawn(reading, advice, width, me)


def test_names_are_shown_as_they_are() -> None:
    nasty = Process(7, GIB, NASTY, NASTY, NASTY, NASTY)
    reading = Reading(0.0, Host(name=NASTY), (Gpu(0, NASTY, throttled=(NASTY,), processes=(nasty,)),), NASTY, (NASTY,))
    told = drawn(reading, (Advice("x", 0, NASTY, NASTY),), 200)
    assert "\\x1b[2J" in told
    assert "[red]not red[/red]" in told


def test_data_comes_back_as_the_reading_and_is_strict_json_whatever_the_numbers_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = replace(machine()(), host=Host(name="a\nb\u2028\x1b", cpu=math.nan, disk_read=math.inf))
    live.write_lines(iter([(machine(2, start=0.0)(), (ADVICE,)), (odd, ())]))
    first, second = capsys.readouterr().out.splitlines()
    assert Reading.from_json(json.loads(first)) == machine(2, start=0.0)()
    assert [Advice.from_json(each) for each in json.loads(first)["advice"]] == [ADVICE]
    assert second.isascii()
    assert "\x1b" not in second
    assert json.loads(second)["host"]["cpu"] is None


def test_samples_are_as_far_apart_as_asked_for_and_slow_ones_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, work, at = 100.0, 0.0, []

    def read() -> Reading:
        nonlocal now
        at.append(now)
        now += work
        return Reading(now, Host())

    def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds >= 0
        now += seconds

    monkeypatch.setattr(live.time, "sleep", sleep)
    monkeypatch.setattr(live.time, "monotonic", lambda: now)
    for work in (0.2, 3.0):
        at.clear()
        taken = live.samples(read, 1.0, once=False)
        for _ in range(4):
            next(taken)
        assert at[1] - at[0] == pytest.approx(0.5 + work), "the first look is for the rates and is not shown"
        assert [later - earlier for earlier, later in pairwise(at[1:])] == pytest.approx([max(1.0, work)] * 3)
    assert len(list(live.samples(read, 1.0, once=True))) == 1


def test_the_picture_for_the_docs_asks_no_server_for_anything() -> None:
    drawn = terminal()
    ElementTree.fromstring(drawn)  # noqa: S314  # made here
    assert "python\xa0train.py" in drawn.replace("&#160;", "\xa0")
    assert "url(" not in drawn.replace("url(#", "")
    assert "Made-up" in drawn
