"""The screen as a function of what was read: everything has its place, and nothing can break out of it."""

import io
import unicodedata
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hotloop.apps.top.advice import Advice
from hotloop.apps.top.cells import in_encoding
from hotloop.apps.top.example import GIB, machine, picture
from hotloop.apps.top.history import History
from hotloop.apps.top.view import screen
from hotloop.apps.top.view_options import SORTS, ViewOptions, press
from hotloop.monitor.reading import Gpu, Host, Process, Reading

from ..thorough import dealt, tries

NASTY = "\x1b[2J\x1b]0;owned\x07\r\n[red]not red[/red] [/] \u202eevil\u2066 \u2028 \x9b31m 漢字 e\u0301\u200d\ud800"
ADVICE = Advice("idle-memory", 0, "4.1 GiB is held by python3 (PID 7), idle for 12 min", "end it with `kill 7`")
SIZES = [(60, 15), (80, 24), (100, 30), (120, 20), (200, 50), (300, 80)]


def after_a_minute(gpus: int = 1) -> tuple[Reading, History]:
    history, read = History(60), machine(gpus, start=1_000_000_000.0)
    readings = [read() for _ in range(61)]
    for reading in readings:
        history.add(reading)
    return readings[-1], history


def drawn(
    reading: Reading,
    advice: tuple[Advice, ...] = (),
    size: tuple[int, int | None] = (80, 24),
    options: ViewOptions = ViewOptions(),  # noqa: B008
    history: History | None = None,
) -> list[Text]:
    if history is None:
        history = History(60)
        history.add(reading)
    return screen(reading, history, advice, width=size[0], height=size[1], options=options)


def shown(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def must_be_harmless(lines: list[Text], width: int) -> None:
    for line in lines:
        assert line.cell_len <= width, line.plain
        assert not any(unicodedata.category(char)[0] == "C" for char in line.plain), repr(line.plain)
        assert line.plain.splitlines() in ([], [line.plain]), repr(line.plain)


@pytest.mark.parametrize(("size", "gpus"), dealt(SIZES, [0, 1, 2, 8, 16], each=2))
def test_every_size_is_filled_and_not_exceeded(size: tuple[int, int], gpus: int) -> None:
    reading, history = after_a_minute(gpus)
    lines = drawn(reading, (ADVICE,), size, history=history)
    assert len(lines) == size[1]
    must_be_harmless(lines, size[0])
    told = shown(lines)
    assert "hotloop top" in lines[0].plain
    assert "q quit" in lines[-1].plain
    assert "4.1 GiB is held by python3" in told
    assert "fix: end it" in told
    assert "CPU" in told
    assert ("H200" in told) is (gpus > 0)


@pytest.mark.parametrize("size", SIZES)
def test_one_gpu_and_some_processes_are_always_there(size: tuple[int, int]) -> None:
    reading, history = after_a_minute()
    told = shown(drawn(reading, (ADVICE,), size, history=history))
    for word in ("H200", "64.0 of 141.0 GiB", "85%", "65 °C", "622", "power cap", "20416", "user", "57.3 GiB"):
        assert word in told, word


def test_what_a_standard_terminal_shows() -> None:
    reading, history = after_a_minute()
    told = shown(drawn(reading, (ADVICE,), (80, 24), history=history))
    for word in (
        *("workstation", "driver 580.95.05", "utilisation", "fan –", "622 of 700 W", "1,755 of 1,980 MHz"),
        *("PCIe ↓ 1.2 GiB/s ↑ 39.1 MiB/s", "throttled: power cap", "26% of 32 cores", "71.5 of 251.0 GiB"),
        *("disk read 202 MiB/s", "network in 1.1 MiB/s", "3 h 7 m", "python train.py", "▃▇██", "4 processes by memory"),
    ):
        assert word in told, word


def test_advice_stands_between_the_gpu_and_the_rest_and_is_marked() -> None:
    reading, history = after_a_minute()
    lines = drawn(reading, (ADVICE,), history=history)
    [place] = [row for row, line in enumerate(lines) if line.plain.startswith(" ! ")]
    assert any("on yellow" in str(span.style) for span in lines[place].spans)
    assert "fix:" in lines[place + 1].plain
    assert any("H200" in line.plain for line in lines[:place])
    assert any("RAM" in line.plain for line in lines[place:])


def test_advice_that_has_no_room_is_counted_and_advice_without_a_fix_has_none() -> None:
    reading, history = after_a_minute()
    many = tuple(replace(ADVICE, words=f"number {number}") for number in range(9))
    told = shown(drawn(reading, many, history=history))
    assert "number 0" in told
    assert "more pieces of advice" in told
    assert "number 8" in shown(drawn(reading, many, (80, None), history=history))
    assert "fix" not in shown(drawn(reading, (replace(ADVICE, fix=None),), history=history))


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_many_gpus_get_a_line_each(gpus: int) -> None:
    reading, history = after_a_minute(gpus)
    lines = [line.plain for line in drawn(reading, (), (80, 24), history=history)]
    rows = [line for line in lines if "H200" in line]
    assert len(rows) == gpus
    assert any("57.3 GiB" in line for line in lines)


def test_gpus_that_have_no_line_are_counted() -> None:
    reading, history = after_a_minute(32)
    assert "more GPUs" in shown(drawn(reading, (), (80, 24), history=history))


def test_without_a_gpu_it_says_why_and_shows_the_host() -> None:
    why = "no NVIDIA GPU can be read: there is no driver"
    told = shown(drawn(Reading(0.0, Host(cpu=12.0, cores=4), notes=(why,))))
    assert told.count(why) == 1
    assert "12% of 4 cores" in told
    assert "hotloop device" in shown(drawn(Reading(0.0, Host())))


def test_what_is_not_known_is_a_dash_and_never_a_number() -> None:
    gpu = Gpu(0, "H200", processes=(Process(7, None, "compute"),))
    lines = drawn(Reading(0.0, Host(), (gpu,)))
    digits = [char for line in lines[1:-1] for char in line.plain if char.isdigit()]
    assert "".join(digits) == "02001" + "7"  # GPU 0, H200, 1 process, PID 7
    assert shown(lines).count("–") > 15
    assert "not visible from here" in shown(lines)


@pytest.mark.parametrize(
    ("processes", "words"), [((), "No process holds memory"), (None, "does not tell which processes")]
)
def test_no_processes_is_not_the_same_as_unknown_processes(processes: tuple[Process, ...] | None, words: str) -> None:
    assert words in shown(drawn(Reading(0.0, Host(), (Gpu(0, "H200", processes=processes),))))


@pytest.mark.parametrize("size", [(80, 24), (60, 15), (200, 50)])
def test_a_failed_gpu_says_so_and_the_others_are_shown(size: tuple[int, int]) -> None:
    reading, history = after_a_minute(2)
    broken = replace(reading, gpus=(Gpu(0, "H200", error="the GPU fell off the bus"), reading.gpus[1]))
    told = shown(drawn(broken, (), size, history=history))
    assert "the GPU fell off the bus" in told
    assert "4.8 of 141.0 GiB" in told


def test_errors_that_were_not_corrected_come_first() -> None:
    reading, history = after_a_minute()
    bad = replace(reading, gpus=(replace(reading.gpus[0], ecc_uncorrected=3),))
    assert "3 uncorrected ECC errors" in shown(drawn(bad, (), (80, 24), history=history))


def people() -> Reading:
    processes = (
        Process(30, 10 * GIB, "compute", "a", "a", "zoe", cpu=1.0, started=500.0),
        Process(10, None, "graphics", "b", "b", "adam", cpu=None, started=None),
        Process(20, 30 * GIB, "both", "c", "c", None, cpu=99.0, started=900.0),
        Process(40, 20 * GIB, "compute", "d", "d", "Adam", cpu=50.0, started=100.0),
    )
    return Reading(1000.0, Host(), (Gpu(1, "H200", processes=processes[:2]), Gpu(0, "H200", processes=processes[2:])))


def pids(options: ViewOptions) -> list[int]:
    rows = [line.plain.split() for line in drawn(people(), (), (120, 40), options)]
    return [int(row[0]) for row in rows if row and row[0] in ("10", "20", "30", "40")]


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("m", [20, 40, 30, 10]),
        ("c", [20, 40, 30, 10]),
        ("a", [40, 30, 20, 10]),
        ("u", [40, 10, 30, 20]),
        ("p", [10, 20, 30, 40]),
        ("g", [20, 40, 30, 10]),
    ],
)
def test_sorting_puts_what_is_not_known_last(key: str, order: list[int]) -> None:
    options = press(ViewOptions(), key)
    assert options is not None
    assert pids(options) == order
    assert f"by {SORTS[key]}" in shown(drawn(people(), options=options))


@pytest.mark.parametrize(("user", "order"), [("ADA", [40, 10]), ("zoe", [30]), ("", [20, 40, 30, 10]), ("eve", [])])
def test_filtering_by_user(user: str, order: list[int]) -> None:
    assert pids(ViewOptions(user=user)) == order
    if not order:
        assert "None of this user" in shown(drawn(people(), options=ViewOptions(user=user)))


def test_scrolling_stops_at_the_end() -> None:
    reading, history = after_a_minute(8)
    options = ViewOptions(sort="PID")
    first = shown(drawn(reading, (), (80, 24), options, history))
    last = shown(drawn(reading, (), (80, 24), replace(options, skipped=10_000), history))
    assert "1204" in first
    assert "31180" not in first
    assert "31180" in last
    assert "–18 ─" in last


def test_yours_are_marked() -> None:
    lines = drawn(people(), options=ViewOptions(me="zoe"))
    assert [line.plain.split()[1] for line in lines if line.plain.startswith("▸")] == ["30"]
    ours = replace(people(), gpus=(Gpu(0, "H200", processes=(Process(9, 1, "compute", ours=True),)),))
    assert any(line.plain.startswith("▸     9") for line in drawn(ours))


def test_keys() -> None:
    options: ViewOptions | None = ViewOptions()
    for key in ("f", "z", "x", "backspace", "o", "up", "q", "backspace", "enter"):
        assert options is not None
        options = press(options, key)
    assert options is not None
    assert (options.user, options.typed) == ("zo", None)
    assert press(options, "escape") == ViewOptions()
    assert press(replace(options, typed="abc"), "escape") == options
    assert press(options, "q") is None
    helped = press(options, "?")
    assert helped is not None
    assert helped.help
    assert press(helped, "m") == options
    assert press(helped, "q") is None
    assert press(options, "up") == options
    assert press(options, "é") == options


def test_the_help_names_every_key() -> None:
    told = shown(drawn(people(), options=ViewOptions(help=True)))
    for word in ("quit", "filter", "user", "Ctrl-C", "Esc", *(f"sort processes by {what}" for what in SORTS.values())):
        assert word in told


def test_what_is_typed_is_shown_and_without_keys_none_are_offered() -> None:
    assert "user: mi▏" in drawn(people(), options=ViewOptions(typed="mi"))[-1].plain
    assert drawn(people(), options=ViewOptions(keys=False))[-1].plain == "Ctrl-C quits"


def test_the_sparkline_shows_the_minute() -> None:
    history = History(60)
    for second in range(61):
        reading = Reading(1000.0 + second, Host(), (Gpu(0, "H200", utilisation=0.0 if second < 30 else 100.0),))
        history.add(reading)
    [line] = [line.plain for line in drawn(reading, (), (120, 40), history=history) if "utilisation" in line.plain]
    curve = line.rsplit("  ", 1)[-1]
    assert set(curve[: len(curve) // 2 - 1]) == {"▁"}
    assert set(curve[len(curve) // 2 + 1 :]) == {"█"}


odd = st.one_of(st.none(), st.text(), st.sampled_from([NASTY, "", " ", "x" * 5000, "漢" * 400, "[bold", "\\", "👩‍🚀"]))
name = odd.map(lambda text: text or "")
real = st.one_of(st.none(), st.floats())
whole = st.one_of(st.none(), st.integers(-5, 2**64))
processes = st.builds(Process, st.integers(-1, 2**31), whole, name, odd, odd, odd, st.booleans(), real, real)
gpus = st.builds(
    Gpu,
    index=st.integers(0, 99),
    name=name,
    utilisation=real,
    memory_used=whole,
    memory_total=whole,
    temperature=real,
    fan=real,
    power=real,
    power_limit=real,
    clock=real,
    clock_most=real,
    memory_clock=real,
    memory_clock_most=real,
    throttled=st.none() | st.lists(name, max_size=3).map(tuple),
    sent=real,
    received=real,
    ecc_corrected=whole,
    ecc_uncorrected=whole,
    processes=st.none() | st.lists(processes, max_size=5).map(tuple),
    error=st.none() | st.none() | odd,
)
hosts = st.builds(Host, odd, real, st.none() | st.integers(0, 512), whole, whole, whole, real, real, real, real)
readings = st.builds(
    Reading,
    st.floats(-1e12, 1e12),
    hosts,
    st.lists(gpus, max_size=4).map(tuple),
    odd,
    st.lists(name, max_size=3).map(tuple),
)
advices = st.lists(st.builds(Advice, name, st.none() | st.integers(), name, odd), max_size=4).map(tuple)
choices = st.builds(
    ViewOptions, st.sampled_from(list(SORTS.values())), name, odd, st.integers(0, 30), st.booleans(), st.booleans(), odd
)


@settings(max_examples=tries(30, 100), deadline=None)
@given(readings, advices, choices, st.integers(1, 300), st.none() | st.integers(1, 80))
def test_whatever_is_read_the_screen_holds(
    reading: Reading, advice: tuple[Advice, ...], options: ViewOptions, width: int, height: int | None
) -> None:
    history = History(60)
    for sample in (reading, replace(reading, time=reading.time + 1)):  # two make a curve
        history.add(sample)
    lines = drawn(reading, advice, (width, height), options, history)
    must_be_harmless(lines, width)
    assert height is None or len(lines) == height


@settings(max_examples=tries(20, 50), deadline=None)
@given(readings, advices)
def test_rich_adds_styles_and_nothing_else(reading: Reading, advice: tuple[Advice, ...]) -> None:
    history = History(60)
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="standard", highlight=False)
    lines = screen(reading, history, advice, width=80, height=24)
    for line in lines:
        console.print(line, no_wrap=True)
    text = out.getvalue()
    while "\x1b[" in text:
        before, _, after = text.partition("\x1b[")
        codes, end, after = after.partition("m")
        assert end
        assert set(codes) <= set("0123456789;"), codes
        text = before + after
    assert text == "".join(f"{line.plain}\n" for line in lines)


@pytest.mark.parametrize("size", SIZES)
def test_names_steer_nothing(size: tuple[int, int]) -> None:
    nasty = Process(7, GIB, NASTY, NASTY, NASTY, NASTY)
    reading = Reading(0.0, Host(name=NASTY), (Gpu(0, NASTY, throttled=(NASTY,), processes=(nasty,)),), NASTY, (NASTY,))
    lines = drawn(reading, (Advice("x", 0, NASTY, NASTY),), size, ViewOptions(user="", typed=NASTY))
    must_be_harmless(lines, size[0])
    assert "\\x1b[2J" in shown(lines)


def test_a_rank_is_named_before_its_command() -> None:
    one = Process(7, GIB, "compute", "python", "python train.py", "ada", rank=1, ranks=4)
    lines = drawn(Reading(0.0, Host(), (Gpu(0, "H200", processes=(one,)),)), (), (100, 24))
    assert "rank 1 of 4: python train.py" in shown(lines)


def test_columns_stay_aligned_behind_wide_names() -> None:
    rows = tuple(Process(pid, GIB, "compute", "x", "x", user) for pid, user in ((1, "漢字かな"), (2, "bob"), (3, None)))
    lines = drawn(Reading(0.0, Host(), (Gpu(0, "H200", processes=rows),)), (), (80, 24))
    ends = {cell_len(line.plain.split("1.0 GiB")[0]) for line in lines if "1.0 GiB" in line.plain}
    assert len(ends) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
def test_terminals_that_have_few_characters_get_what_they_have(encoding: str) -> None:
    reading, history = after_a_minute()
    lines = drawn(reading, (ADVICE,), history=history)
    kept = in_encoding(lines, encoding)
    assert [line.cell_len for line in kept] == [line.cell_len for line in lines]
    for line in kept:
        line.plain.encode(encoding)
    assert "H200" in shown(kept)


def test_the_picture_for_the_docs_asks_no_server_for_anything() -> None:
    drawn = picture()
    ElementTree.fromstring(drawn)  # noqa: S314  # made here
    assert "python\xa0train.py" in drawn.replace("&#160;", "\xa0")
    assert "url(" not in drawn.replace("url(#", "")
    assert "Made-up" in drawn
