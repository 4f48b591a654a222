"""The advice: every rule speaks on its sample, keeps silent at its edges, and stops when its condition ends."""

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.apps.top.advice import Advice, Advisor
from hotloop.monitor.reading import Gpu, Host, Process, Reading
from hotloop.printing.text import printable

from ..thorough import tries

SAMPLES = Path(__file__).parent / "samples"
SILENT = {"training", "nobody-there", "without-gpu"}
GIB = 2**30

BUSY = Process(7, 90 * GIB, "compute", name="python3", user="ann", cpu=100.0, started=1.0)
IDLE = Process(8, 4 * GIB, "compute", name="python3", user="bob", cpu=0.0, started=1.0)
CARD = Gpu(0, "H200", utilisation=95.0, memory_used=90 * GIB, memory_total=140 * GIB, processes=(BUSY,))
CALM = replace(CARD, utilisation=0.0, memory_used=4 * GIB, processes=(IDLE,))
HOST = Host(cpu=10.0, memory_used=10 * GIB, memory_total=100 * GIB, swap_used=0)


class Scene:
    """An advisor to which the same situation is shown for a while, then another."""

    def __init__(self, **options: object) -> None:
        self.advisor = Advisor(**options)
        self.time = 1_000_000.0
        self.said: tuple[Advice, ...] = ()

    def show(self, seconds: float, *gpus: Gpu, host: Host = HOST, every: float = 1.0) -> list[str]:
        """Look at it for so long; gives the rules that speak at the end."""
        for _ in range(max(1, round(seconds / every))):
            self.said = self.advisor.see(Reading(self.time, host, gpus))
            self.time += every
        return [advice.rule for advice in self.said]


# ---- on the samples


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_sample_makes_its_rule_speak_and_no_other(path: Path) -> None:
    advisor = Advisor()
    readings = [Reading.from_json(json.loads(line)) for line in path.read_text().splitlines()]
    said = [advisor.see(reading) for reading in readings]
    rules = {advice.rule for moment in said for advice in moment}
    assert rules == ({path.stem} if path.stem not in SILENT else set())
    if rules:
        (advice,) = said[-1]
        assert not said[0], "nothing is known from a single look at a machine that is well"
        assert advice.fix
        assert advice.evidence
        assert Advice.from_json(json.loads(json.dumps(advice.to_json()))) == advice


def test_every_rule_has_a_sample() -> None:
    source = Path(__file__).parents[2] / "src/hotloop/apps/top/advice"
    code = "\n".join(path.read_text() for path in source.glob("*.py"))
    rules = set(re.findall(r'Advice\(\s+"([a-z-]+)"', code)) | {"power-cap", "heat", "hardware-slowdown"}
    assert {path.stem for path in SAMPLES.glob("*.jsonl")} == rules | SILENT


def last_words(name: str) -> str:
    advisor = Advisor()
    said: tuple[Advice, ...] = ()
    for line in (SAMPLES / f"{name}.jsonl").read_text().splitlines():
        said = advisor.see(Reading.from_json(json.loads(line)))
    return said[0].words


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ("idle-memory", "4.1 GiB of GPU 0 is held by python3 (PID 4711 of ann, idle for 12 min)"),
        ("power-cap", "GPU 0 is power-capped: clocks at 61%"),
        ("newcomer", "another process, python3 (PID 5120 of bob), came to GPU 0 while yours ran and holds 13.5 GiB"),
        ("failed", "GPU 0 does not answer: GPU is lost"),
        ("idle-gpu", "GPU 1 is idle while GPU 0 is full (utilisation 98%, memory 68%)"),
    ],
)
def test_the_words(sample: str, words: str) -> None:
    assert last_words(sample) == words


# ---- idle-memory


def test_idle_memory_needs_five_minutes() -> None:
    scene = Scene()
    assert scene.show(300, CALM) == []
    assert scene.show(1, CALM) == ["idle-memory"]
    assert scene.said[0].evidence["idle_seconds"] == 300
    assert Scene(idle_for=20).show(21, CALM) == ["idle-memory"]


@pytest.mark.parametrize(
    "gpu",
    [
        replace(CALM, processes=(replace(IDLE, cpu=6.0),)),
        replace(CALM, processes=(replace(IDLE, cpu=None),)),
        replace(CALM, processes=(replace(IDLE, memory=255 * 2**20),)),
        replace(CALM, processes=(replace(IDLE, memory=None),)),
        replace(CALM, processes=(replace(IDLE, kind="graphics"),)),
        replace(CALM, processes=None),
        replace(CALM, utilisation=2.0),
        replace(CALM, utilisation=None),
        replace(CALM, utilisation=50.0, processes=(IDLE, replace(BUSY, cpu=49.0))),
    ],
)
def test_memory_is_not_held_idly_where_somebody_may_work(gpu: Gpu) -> None:
    assert "idle-memory" not in Scene().show(900, gpu, every=5.0)


def test_an_idle_holder_beside_one_who_computes() -> None:
    scene = Scene()
    assert scene.show(400, replace(CARD, processes=(BUSY, IDLE)), every=5.0) == ["idle-memory"]
    assert scene.said[0].evidence["pid"] == IDLE.pid


def test_idle_memory_ends_with_work_or_with_the_process() -> None:
    working = replace(CALM, utilisation=60.0, processes=(replace(IDLE, cpu=90.0),))
    for ending in (working, replace(CALM, processes=())):
        scene = Scene()
        assert scene.show(301, CALM) == ["idle-memory"]
        assert scene.show(1, ending) == []
        scene.show(2, ending)
        assert scene.show(200, CALM) == []


def test_a_notebook_that_saves_itself_is_still_idle_but_one_kernel_is_work() -> None:
    scene = Scene()
    scene.show(200, CALM)
    scene.show(1, replace(CALM, processes=(replace(IDLE, cpu=80.0),)))
    assert scene.show(101, CALM) == ["idle-memory"]
    scene.show(1, replace(CALM, utilisation=30.0, processes=(replace(IDLE, cpu=3.0),)))
    assert scene.show(200, CALM) == []


def test_a_number_that_two_processes_had_one_after_the_other() -> None:
    scene = Scene()
    scene.show(250, CALM)
    assert scene.show(200, replace(CALM, processes=(replace(IDLE, started=500.0),))) == []


def test_memory_that_this_program_holds_is_freed_otherwise() -> None:
    scene = Scene()
    scene.show(301, replace(CALM, processes=(replace(IDLE, ours=True),)))
    assert "empty_cache" in (scene.said[0].fix or "")


# ---- waiting, starved, pcie

FULL = replace(CARD, memory_used=112 * GIB, utilisation=30.0)  # 80% of the memory


def test_waiting_needs_its_minute_and_half_a_minute_more() -> None:
    scene = Scene()
    assert scene.show(60, FULL) == []
    assert scene.show(30, FULL) == ["waiting"]
    assert "`hotloop" in (scene.said[0].fix or "")


@pytest.mark.parametrize(
    "gpu",
    [
        replace(FULL, utilisation=31.0),
        replace(FULL, utilisation=None),
        replace(FULL, memory_used=111 * GIB),
        replace(FULL, memory_used=None),
        replace(FULL, utilisation=1.0, processes=(replace(BUSY, cpu=19.0),)),
        replace(FULL, utilisation=1.0, processes=None),
    ],
)
def test_a_gpu_that_does_not_wait(gpu: Gpu) -> None:
    assert Scene().show(200, gpu, every=5.0) == []


def test_waiting_is_seen_where_processes_cannot_be() -> None:
    assert Scene().show(200, replace(FULL, processes=None, utilisation=9.0), every=5.0) == ["waiting"]


def test_waiting_does_not_flicker_and_ends() -> None:
    scene = Scene()
    scene.show(120, FULL)
    for utilisation in (35.0, 39.0, 28.0, 36.0):
        assert scene.show(30, replace(FULL, utilisation=utilisation)) == ["waiting"]
    assert scene.show(60, replace(FULL, utilisation=80.0)) == []
    assert scene.show(60, replace(FULL, utilisation=35.0)) == []  # between the two: it would have to fall below 30


def test_short_pauses_of_a_good_loop_are_not_waiting() -> None:
    scene = Scene()
    for _ in range(20):
        assert scene.show(12, replace(FULL, utilisation=2.0)) == []
        assert scene.show(12, replace(FULL, utilisation=95.0)) == []


def test_starved_says_why_and_waiting_keeps_silent() -> None:
    scene = Scene()
    full = replace(HOST, cpu=96.0)
    assert scene.show(120, FULL, host=full) == ["starved"]
    assert scene.show(60, FULL, host=replace(HOST, cpu=86.0)) == ["starved"]
    assert scene.show(60, FULL, host=replace(HOST, cpu=20.0)) == ["waiting"]


@pytest.mark.parametrize(("cpu", "utilisation"), [(94.0, 20.0), (100.0, 51.0), (None, 20.0), (100.0, None)])
def test_a_gpu_that_is_not_starved(cpu: float | None, utilisation: float | None) -> None:
    gpu = replace(CARD, utilisation=utilisation)
    assert Scene().show(200, gpu, host=replace(HOST, cpu=cpu), every=5.0) == []


def test_a_full_cpu_beside_a_gpu_that_nobody_uses_is_not_its_business() -> None:
    gpu = replace(CALM, processes=())
    assert Scene().show(200, gpu, host=replace(HOST, cpu=100.0), every=5.0) == []


@pytest.mark.parametrize("way", ["sent", "received"])
def test_pcie(way: str) -> None:
    scene = Scene()
    assert scene.show(200, replace(CARD, utilisation=90.0, **{way: 7.9e9}), every=5.0) == []
    assert scene.show(200, replace(CARD, utilisation=90.0, **{way: 8.1e9}), every=5.0) == ["pcie"]
    assert scene.show(200, replace(CARD, utilisation=90.0, **{way: 6.1e9}), every=5.0) == ["pcie"]
    assert scene.show(200, replace(CARD, utilisation=90.0, **{way: 5.9e9}), every=5.0) == []
    assert scene.show(200, replace(CARD, utilisation=91.0, **{way: 30e9}), every=5.0) == []  # the copies are hidden


# ---- power-cap, heat, hardware-slowdown

FAST = replace(CARD, clock=1000.0, clock_most=1000.0, throttled=())


@pytest.mark.parametrize(
    ("reasons", "rules"),
    [
        (("power cap",), ["power-cap"]),
        (("heat",), ["heat"]),
        (("heat", "hardware slowdown"), ["heat"]),
        (("hardware slowdown",), ["hardware-slowdown"]),
        (("power brake",), ["hardware-slowdown"]),
        (("power brake", "heat"), ["hardware-slowdown", "heat"]),
        (("clock setting", "sync boost", "display"), []),
        ((), []),
        (None, []),
    ],
)
def test_slowed(reasons: tuple[str, ...] | None, rules: list[str]) -> None:
    scene = Scene()
    slow = replace(FAST, clock=610.0, throttled=reasons)
    assert scene.show(20, slow) == []
    assert sorted(scene.show(1, slow)) == sorted(rules)
    assert all("clocks at 61%" in advice.words for advice in scene.said)
    assert scene.show(6, FAST) == []


def test_the_reasons_are_those_of_the_sampler() -> None:
    from hotloop.apps.top.advice.trouble import KINDS
    from hotloop.monitor.card import REASONS

    assert set(KINDS) <= set(REASONS)


def test_a_power_limit_matters_where_it_costs_clocks() -> None:
    capped = replace(FAST, throttled=("power cap",))
    assert Scene().show(100, replace(capped, clock=851.0)) == []
    assert Scene().show(100, replace(capped, clock=None)) == []
    scene = Scene()
    assert scene.show(100, replace(capped, clock=849.0)) == ["power-cap"]
    assert scene.show(60, replace(capped, clock=895.0)) == ["power-cap"]
    assert scene.show(60, replace(capped, clock=905.0)) == []


def test_heat_is_said_even_where_clocks_are_not_known() -> None:
    scene = Scene()
    assert scene.show(30, replace(FAST, clock=None, throttled=("heat",), temperature=93.0)) == ["heat"]
    assert scene.said[0].words == "GPU 0 is slowed down by heat (93 °C)"


def test_a_reason_that_comes_and_goes_is_one_but_a_rare_one_is_none() -> None:
    often, seldom = Scene(), Scene()
    hot = replace(FAST, throttled=("heat",))
    for _ in range(20):
        often.show(1, hot)
        often.show(3, FAST)
        seldom.show(1, hot)
        assert seldom.show(6, FAST) == []
    assert often.show(1, hot) == ["heat"]


# ---- newcomer

MINE = replace(BUSY, ours=True)
OTHER = replace(IDLE, cpu=80.0)


def test_a_newcomer_counts_after_ten_seconds_and_until_one_of_the_two_leaves() -> None:
    both = replace(CARD, processes=(MINE, OTHER))
    for ending in (replace(CARD, processes=(MINE,)), replace(CARD, processes=(OTHER,))):
        scene = Scene()
        scene.show(5, replace(CARD, processes=(MINE,)))
        assert scene.show(10, both) == []
        assert scene.show(1, both) == ["newcomer"]
        assert scene.show(600, both, every=10.0) == ["newcomer"]
        assert scene.show(1, ending) == []


def test_who_was_there_before_is_no_newcomer() -> None:
    scene = Scene()
    scene.show(5, replace(CARD, processes=(OTHER,)))
    assert scene.show(60, replace(CARD, processes=(MINE, OTHER))) == []
    assert Scene().show(60, replace(CARD, processes=(MINE, OTHER))) == []


def test_passers_by_screens_and_our_own_are_no_newcomers() -> None:
    scene = Scene()
    alone = replace(CARD, processes=(MINE,))
    for number in range(20):
        scene.show(5, alone)
        assert scene.show(5, replace(CARD, processes=(MINE, replace(OTHER, pid=1000 + number)))) == []
    scene.show(5, alone)
    assert scene.show(60, replace(CARD, processes=(MINE, replace(OTHER, kind="graphics")))) == []
    scene.show(5, alone)
    assert scene.show(60, replace(CARD, processes=(MINE, replace(OTHER, ours=True)))) == []


def test_a_list_that_is_missing_once_changes_nothing() -> None:
    scene = Scene()
    scene.show(5, replace(CARD, processes=(MINE, OTHER)))
    scene.show(1, replace(CARD, processes=None))
    assert scene.show(60, replace(CARD, processes=(MINE, OTHER))) == []


def test_somebody_who_looks_from_outside_is_known_by_name() -> None:
    for user, rules in (("ann", ["newcomer"]), ("eve", []), (None, [])):
        scene = Scene(user=user)
        scene.show(5, CARD)
        assert scene.show(60, replace(CARD, processes=(BUSY, OTHER))) == rules


# ---- memory-errors, failed


def test_memory_errors_are_said_at_once_and_until_they_are_forgotten() -> None:
    scene = Scene()
    for errors, rules in ((0, []), (None, []), (1, ["memory-errors"]), (3, ["memory-errors"]), (0, [])):
        assert scene.show(1, replace(CARD, ecc_uncorrected=errors)) == rules


def test_a_failed_gpu_is_said_at_once_and_until_it_answers() -> None:
    scene = Scene()
    lost = Gpu(1, "H200", error="lost\x1b[2J")
    assert scene.show(1, CARD, lost) == ["failed"]
    assert scene.said[0].gpu == 1
    assert "\x1b" not in scene.said[0].words + str(scene.said[0].evidence)
    assert scene.show(1, CARD, replace(CARD, index=1)) == []


# ---- the host


def test_host_memory() -> None:
    scene = Scene()

    def used(gib: int) -> Host:
        return replace(HOST, memory_used=gib * GIB)

    assert scene.show(60, host=used(94)) == []
    assert scene.show(10, host=used(95)) == []
    assert scene.show(1, host=used(95)) == ["host-memory"]
    assert scene.show(60, host=used(93)) == ["host-memory"]
    assert scene.show(1, host=used(91)) == []
    assert scene.show(60, host=replace(HOST, memory_total=None)) == []
    assert scene.show(60, host=Host()) == []


def swap(scene: Scene, gpu: Gpu | None, mebibytes_a_minute: float, seconds: int, start: float = 0.0) -> list[str]:
    rules: list[str] = []
    for second in range(seconds):
        swapped = int((start + mebibytes_a_minute * second / 60) * 2**20)
        rules = scene.show(1, *([gpu] if gpu else []), host=replace(HOST, cpu=60.0, swap_used=swapped))
    return rules


def test_swapping_is_said_while_somebody_computes() -> None:
    assert swap(Scene(), CARD, 200, 120) == []
    assert swap(Scene(), replace(CALM, processes=()), 1000, 120) == []
    scene = Scene()
    assert swap(scene, CARD, 300, 120) == ["swapping"]
    assert swap(scene, CARD, 0, 61, start=595) == []
    assert swap(Scene(), None, 300, 120) == ["swapping"]  # without a GPU, a busy CPU is what trains


# ---- idle-gpu

SPARE = replace(CALM, index=1, memory_used=GIB, processes=())


def test_an_idle_gpu_beside_a_full_one() -> None:
    scene = Scene()
    assert scene.show(120, CARD, SPARE) == []
    assert scene.show(60, CARD, SPARE, replace(SPARE, index=2)) == ["idle-gpu"]
    assert scene.said[0].gpu == 1
    assert scene.show(200, CARD, SPARE, replace(SPARE, index=2)) == ["idle-gpu"]
    assert scene.said[0].gpu is None
    assert scene.said[0].words.startswith("GPUs 1, 2 are idle while GPU 0 is full")
    assert scene.show(1, CARD) == []


@pytest.mark.parametrize(
    ("full", "idle"),
    [
        (replace(CARD, utilisation=89.0), SPARE),
        (CARD, replace(SPARE, utilisation=2.0)),
        (CARD, replace(SPARE, memory_used=8 * GIB)),
        (CARD, replace(SPARE, memory_total=69 * GIB)),  # a small card for the screen
        (CARD, replace(SPARE, utilisation=None)),
        (replace(CARD, utilisation=None), SPARE),
        (replace(SPARE, index=0), SPARE),
    ],
)
def test_gpus_of_which_none_is_to_spare(full: Gpu, idle: Gpu) -> None:
    assert Scene().show(400, full, idle, every=5.0) == []


def test_a_gpu_whose_memory_is_full_while_it_computes_is_full() -> None:
    gpu = replace(CARD, utilisation=40.0, memory_used=127 * GIB)
    assert Scene().show(400, gpu, SPARE, every=5.0) == ["idle-gpu"]
    assert Scene().show(400, replace(gpu, memory_used=125 * GIB), SPARE, every=5.0) == []


# ---- all of them


def test_a_clock_that_jumps_makes_nothing_older() -> None:
    scene = Scene()
    scene.show(200, CALM)
    scene.time -= 50_000
    assert scene.show(90, CALM) == []
    assert scene.show(20, CALM) == ["idle-memory"]


def test_a_night_in_which_nobody_looked_is_not_counted() -> None:
    scene = Scene()
    scene.show(200, CALM)
    scene.time += 30_000
    assert scene.show(290, CALM) == []
    assert scene.show(20, CALM) == ["idle-memory"]


def test_rare_readings_will_do() -> None:
    assert Scene().show(600, CALM, every=30.0) == ["idle-memory"]
    assert Scene().show(300, FULL, every=20.0) == ["waiting"]


def test_foreign_names_cannot_steer_a_terminal_or_fill_it() -> None:
    scene = Scene()
    scene.show(301, replace(CALM, processes=(replace(IDLE, name="\x1b]0;evil\x07" + "x" * 5000, user="b\nb"),)))
    words = scene.said[0].words
    assert words.isprintable()
    assert len(words) < 200


numbers = st.one_of(st.none(), st.floats(0, 200), st.integers(0, 2**40))
some_process = st.builds(
    Process,
    pid=st.integers(1, 5),
    memory=st.one_of(st.none(), st.integers(0, 2**38)),
    kind=st.sampled_from(["compute", "graphics", "both"]),
    name=st.one_of(st.none(), st.text(max_size=50)),
    user=st.one_of(st.none(), st.text(max_size=5)),
    ours=st.booleans(),
    cpu=st.one_of(st.none(), st.sampled_from([0.0, 100.0])),
)
some_gpu = st.builds(
    Gpu,
    index=st.integers(0, 2),
    name=st.just("GPU"),
    utilisation=numbers,
    memory_used=st.one_of(st.none(), st.integers(0, 2**38)),
    memory_total=st.one_of(st.none(), st.integers(0, 2**38)),
    clock=numbers,
    clock_most=numbers,
    sent=numbers,
    temperature=numbers,
    throttled=st.one_of(st.none(), st.lists(st.sampled_from(["heat", "power cap", "power brake", "odd"])).map(tuple)),
    ecc_uncorrected=st.one_of(st.none(), st.integers(0, 3)),
    processes=st.one_of(st.none(), st.lists(some_process, max_size=3).map(tuple)),
    error=st.one_of(st.none(), st.text(max_size=20)),
)
some_host = st.builds(Host, cpu=numbers, memory_used=numbers, memory_total=numbers, swap_used=numbers)


@given(
    st.lists(st.tuples(some_host, st.lists(some_gpu, max_size=3, unique_by=lambda gpu: gpu.index)), max_size=6),
    st.sampled_from([0.0, 0.5, 20.0, 70.0, -3.0]),
)
@settings(deadline=None, max_examples=tries(25, 60))
def test_whatever_is_read_gives_plain_sentences(situations: list[tuple[Host, list[Gpu]]], pace: float) -> None:
    scene = Scene(user="ann", idle_for=1)
    for host, gpus in situations:
        scene.show(30, *gpus, host=host, every=10.0)
        scene.time += pace
        for advice in scene.said:
            assert printable(advice.words) == advice.words
            assert Advice.from_json(json.loads(json.dumps(advice.to_json()))) == advice


def test_memory_does_not_grow_with_the_processes_that_came_and_went() -> None:
    scene = Scene(user="ann")

    def churn(first: int, last: int) -> int:
        for number in range(first, last):
            passing = replace(IDLE, pid=1000 + number, started=float(number))
            scene.show(1, replace(CARD, processes=(BUSY, passing)), every=0.5)
        return len(pickle.dumps(scene.advisor))

    assert churn(200, tries(1000, 4000)) == pytest.approx(churn(0, 200), rel=0.05)
