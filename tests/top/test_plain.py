"""Text and data for pipes: no escape sequence, nothing left out, even distances."""

import io
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.top.advice import Advice
from hotloop.apps.top.example import machine
from hotloop.apps.top.plain import Texts, as_data, as_line, is_plain, samples
from hotloop.apps.top.view_options import ViewOptions
from hotloop.monitor.reading import Gpu, Host, Process, Reading

ADVICE = Advice("waiting", 0, "memory is full but utilisation is 9%", "run `hotloop doctor`", {"utilisation": 9.0})


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "plain"),
    [
        (Tty(), {"TERM": "xterm"}, False),
        (Tty(), {"TERM": "xterm", "NO_COLOR": ""}, False),  # as no-color.org has it: empty is not set
        (Tty(), {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (Tty(), {"TERM": "dumb"}, True),
        (Tty(), {}, False),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, True),
    ],
)
def test_what_gets_plain_text(stream: io.StringIO, environ: dict[str, str], plain: bool) -> None:
    assert is_plain(stream, environ) is plain


def written(*readings: Reading, width: int = 80, options: ViewOptions = ViewOptions(), **more: bool) -> str:  # noqa: B008
    out = io.StringIO()
    texts = Texts(out, options, width=width, **more)
    for reading in readings:
        texts.show(reading, (ADVICE,))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_text_holds_everything_and_no_escape(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = written(machine(12)(), width=width)
    assert "\x1b" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert sum("H200" in line for line in text.splitlines()) == 12
    assert sum("57.3" in line and "GiB" in line for line in written(machine(12)()).splitlines()) == 6
    assert "q quit" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_text_tells_the_advice_with_its_fix() -> None:
    text = written(machine()())
    assert "memory is full but utilisation is 9%" in text
    assert "fix: run `hotloop doctor`" in text


def test_readings_are_apart_and_only_styled_ones_have_colours() -> None:
    read = machine(start=0.0)
    text = written(*(read() for _ in range(10)))
    assert text.count("\n\nhotloop top") == 9
    assert "▄▄" in text.split("\n\n")[-1]  # the history goes on from one to the next
    assert "\x1b[" in written(read(), styled=True)


def test_all_processes_are_there_and_a_user_can_be_chosen() -> None:
    people = tuple(Process(pid, 1, "compute", "x", "x", f"user{pid % 2}") for pid in range(1000, 1100))
    reading = Reading(0.0, Host(), (Gpu(0, "H200", processes=people),))
    assert (
        sum(line.split()[:1] == [str(pid)] for line in written(reading).splitlines() for pid in range(1000, 1100))
        == 100
    )
    assert "50 processes" in written(reading, options=ViewOptions(user="user1"))


def test_a_pipe_that_has_few_characters_gets_what_it_has() -> None:
    bytes_ = io.BytesIO()
    out = io.TextIOWrapper(bytes_, encoding="ascii")
    Texts(out, ViewOptions(), width=80).show(machine()(), (ADVICE,))
    assert "NVIDIA H200" in bytes_.getvalue().decode("ascii")


class Clock:
    """Time that passes only where somebody sleeps or works."""

    def __init__(self, work: float = 0.0) -> None:
        self.now = 100.0
        self.work = work
        self.taken: list[float] = []

    def read(self) -> Reading:
        self.taken.append(self.now)
        self.now += self.work
        return Reading(self.now, Host())

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def tell(self) -> float:
        """It goes on while it is asked."""
        self.now += 1e-6
        return self.now


@given(st.floats(0.1, 100), st.integers(1, 20), st.floats(0, 0.5))
def test_samples_are_as_many_and_as_far_apart_as_asked_for(every: float, count: int, work: float) -> None:
    clock = Clock(work * every)
    got = list(samples(clock.read, every=every, count=count, sleep=clock.sleep, clock=lambda: clock.now))
    assert len(got) == count
    first, *shown = clock.taken  # the first look is for the rates and is not shown
    assert 0 < shown[0] - first <= 0.5 + 0.5 * every + 1e-6
    for earlier, later in pairwise(shown):
        assert math.isclose(later - earlier, every, rel_tol=1e-6)


def test_slow_readings_do_not_pile_up() -> None:
    clock = Clock(work=3.0)
    list(samples(clock.read, every=1.0, count=4, sleep=clock.sleep, clock=clock.tell))
    between = [later - earlier for earlier, later in pairwise(clock.taken[1:])]
    assert between == pytest.approx([3.0] * 3, abs=1e-3)


def test_data_comes_back_as_the_reading_and_its_advice() -> None:
    reading = machine(2)()
    data = json.loads(as_line(reading, (ADVICE,)))
    assert data == json.loads(json.dumps(as_data(reading, (ADVICE,))))
    assert Reading.from_json(data) == reading
    assert [Advice.from_json(each) for each in data["advice"]] == [ADVICE]
    assert as_line(reading, ()).count("\n") == 1


def test_data_is_strict_json_whatever_the_numbers_and_names_are() -> None:
    reading = replace(machine()(), host=Host(name="a\nb\u2028\x1b", cpu=math.nan, disk_read=math.inf))
    line = as_line(reading, ())
    assert line.isascii()
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert json.loads(line)["host"]["cpu"] is None
