"""The advice: every rule speaks on its sample, keeps silent at its edges, and stops when its condition ends."""

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.apps.top.advice import Advice, Advisor, trouble
from hotloop.monitor.nvml_gpus import REASONS
from hotloop.monitor.reading import Gpu, Host, Process, Reading
from hotloop.printing.text import printable

from ..thorough import tries
from .pretend import READINGS

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


WORDS = {
    "idle-memory": "4.1 GiB of GPU 0 is held by python3 (PID 4711 of ann, idle for 12 min)",
    "power-cap": "GPU 0 is power-capped: clocks at 61%",
    "failed": "GPU 0 does not answer: GPU is lost",
    "idle-gpu": "GPU 1 is idle while GPU 0 is full (utilisation 98%, memory 68%)",
}


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
        assert advice.words == WORDS.get(path.stem, advice.words)
        assert advice.fix
        assert Advice.from_json(json.loads(json.dumps(advice.to_json()))) == advice


def test_every_rule_has_a_sample() -> None:
    source = Path(__file__).parents[2] / "src/hotloop/apps/top/advice"
    code = "\n".join(path.read_text() for path in source.glob("*.py"))
    rules = set(re.findall(r'Advice\(\s*"([a-z-]+)"', code)) | {"power-cap", "heat", "hardware-slowdown"}
    assert {path.stem for path in SAMPLES.glob("*.jsonl")} == rules | SILENT


FULL = replace(CARD, memory_used=112 * GIB, utilisation=30.0)  # 80% of the memory
SPARE = replace(CALM, index=1, memory_used=GIB, processes=())
BUSY_HOST = replace(HOST, cpu=100.0)
UNKNOWN = {"utilisation": None}


def holding(**changes: object) -> Gpu:
    return replace(CALM, processes=(replace(IDLE, **changes),))


@pytest.mark.parametrize(
    ("rules", "gpus", "host"),
    [
        (["idle-memory"], [CALM], HOST),
        (["idle-memory"], [replace(CARD, processes=(BUSY, IDLE))], HOST),  # beside one who computes
        *(([], [holding(**odd)], HOST) for odd in ({"cpu": 6.0}, {"cpu": None}, {"memory": 255 * 2**20})),
        *(([], [holding(**odd)], HOST) for odd in ({"memory": None}, {"kind": "graphics"})),
        *(([], [replace(CALM, **odd)], HOST) for odd in ({"processes": None}, {"utilisation": 2.0}, UNKNOWN)),
        ([], [replace(CALM, utilisation=50.0, processes=(IDLE, replace(BUSY, cpu=49.0)))], HOST),
        (["waiting"], [FULL], HOST),
        (["waiting"], [replace(FULL, processes=None, utilisation=9.0)], HOST),
        *(([], [replace(FULL, **odd)], HOST) for odd in ({"utilisation": 31.0}, UNKNOWN, {"memory_used": None})),
        ([], [replace(FULL, memory_used=111 * GIB)], HOST),
        ([], [replace(FULL, utilisation=1.0, processes=(replace(BUSY, cpu=19.0),))], HOST),
        ([], [replace(FULL, utilisation=1.0, processes=None)], HOST),
        ([], [replace(CARD, utilisation=20.0)], replace(HOST, cpu=94.0)),
        ([], [replace(CARD, utilisation=51.0)], BUSY_HOST),
        ([], [replace(CARD, utilisation=20.0)], replace(HOST, cpu=None)),
        ([], [replace(CARD, utilisation=None)], BUSY_HOST),
        ([], [replace(CALM, processes=())], BUSY_HOST),  # nobody uses the GPU
        ([], [replace(CARD, utilisation=89.0), SPARE], HOST),
        *(
            ([], [CARD, replace(SPARE, **odd)], HOST)
            for odd in ({"utilisation": 2.0}, UNKNOWN, {"memory_used": 8 * GIB})
        ),
        ([], [CARD, replace(SPARE, memory_total=69 * GIB)], HOST),  # a small card for the screen
        ([], [replace(CARD, utilisation=None), SPARE], HOST),
        ([], [replace(SPARE, index=0), SPARE], HOST),
        (["idle-gpu"], [replace(CARD, utilisation=40.0, memory_used=127 * GIB), SPARE], HOST),
        ([], [replace(CARD, utilisation=40.0, memory_used=125 * GIB), SPARE], HOST),
    ],
)
@pytest.mark.parametrize("every", [5.0, 20.0])
def test_what_is_said_of_a_quarter_of_an_hour(rules: list[str], gpus: list[Gpu], host: Host, every: float) -> None:
    assert Scene().show(900, *gpus, host=host, every=every) == rules


def test_idle_memory_needs_five_minutes_and_ends_with_work_or_with_the_process() -> None:
    scene = Scene()
    assert scene.show(300, holding(ours=True, name="\x1b]0;evil\x07" + "x" * 5000, user="b\nb")) == []
    assert scene.show(1, holding(ours=True, name="\x1b]0;evil\x07" + "x" * 5000)) == ["idle-memory"]
    assert "empty_cache" in (scene.said[0].fix or ""), "memory that this program holds is freed otherwise"
    assert scene.said[0].words.isprintable()
    assert len(scene.said[0].words) < 200
    assert Scene(idle_for=20).show(21, CALM) == ["idle-memory"]
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


def test_waiting_needs_its_minute_and_half_a_minute_more_does_not_flicker_and_ends() -> None:
    scene = Scene()
    assert scene.show(60, FULL) == []
    assert scene.show(60, FULL) == ["waiting"]
    assert "`hotloop" in (scene.said[0].fix or "")
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
    assert set(trouble.KINDS) <= set(REASONS), "the reasons are those of the sampler"
    assert scene.show(6, FAST) == []


def test_a_power_limit_matters_where_it_costs_clocks() -> None:
    capped = replace(FAST, throttled=("power cap",))
    assert Scene().show(100, replace(capped, clock=851.0)) == []
    assert Scene().show(100, replace(capped, clock=None)) == []
    scene = Scene()
    assert scene.show(100, replace(capped, clock=849.0)) == ["power-cap"]
    assert scene.show(60, replace(capped, clock=895.0)) == ["power-cap"]
    assert scene.show(60, replace(capped, clock=905.0)) == []
    assert scene.show(30, replace(FAST, clock=None, throttled=("heat",), temperature=93.0)) == ["heat"]
    assert scene.said[0].words == "GPU 0 is slowed down by heat (93 °C)", "clocks that are not known"


def test_a_reason_that_comes_and_goes_is_one_but_a_rare_one_is_none() -> None:
    often, seldom = Scene(), Scene()
    hot = replace(FAST, throttled=("heat",))
    for _ in range(20):
        often.show(1, hot)
        often.show(3, FAST)
        seldom.show(1, hot)
        assert seldom.show(6, FAST) == []
    assert often.show(1, hot) == ["heat"]


def test_memory_errors_and_a_gpu_that_fails_are_said_at_once_and_until_it_is_over() -> None:
    scene = Scene()
    for errors, rules in ((0, []), (None, []), (1, ["memory-errors"]), (3, ["memory-errors"]), (0, [])):
        assert scene.show(1, replace(CARD, ecc_uncorrected=errors)) == rules
    assert scene.show(1, CARD, Gpu(1, "H200", error="lost\x1b[2J")) == ["failed"]
    assert scene.said[0].gpu == 1
    assert "\x1b" not in scene.said[0].words
    assert scene.show(1, CARD, replace(CARD, index=1)) == []


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


def test_an_idle_gpu_beside_a_full_one() -> None:
    scene = Scene()
    assert scene.show(120, CARD, SPARE) == []
    assert scene.show(60, CARD, SPARE, replace(SPARE, index=2)) == ["idle-gpu"]
    assert scene.said[0].gpu == 1
    assert scene.show(200, CARD, SPARE, replace(SPARE, index=2)) == ["idle-gpu"]
    assert scene.said[0].gpu is None
    assert scene.said[0].words.startswith("GPUs 1, 2 are idle while GPU 0 is full")
    assert scene.show(1, CARD) == []


@pytest.mark.parametrize("by", [-50_000, 30_000])
def test_a_clock_that_jumps_makes_nothing_older_and_a_night_does_not_count(by: int) -> None:
    scene = Scene()
    scene.show(200, CALM)
    scene.time += by
    if by > 0:
        scene.show(200, CALM)
    assert scene.show(90, CALM) == []
    assert scene.show(20, CALM) == ["idle-memory"]


@given(st.lists(READINGS, max_size=6), st.sampled_from([0.0, 0.5, 20.0, 70.0, -3.0]))
@settings(deadline=None, max_examples=tries(25, 60))
def test_whatever_is_read_gives_plain_sentences(situations: list[Reading], pace: float) -> None:
    scene = Scene(idle_for=1)
    for reading in situations:
        scene.show(30, *reading.gpus, host=reading.host, every=10.0)
        scene.time += pace
        for advice in scene.said:
            assert printable(advice.words) == advice.words
            assert Advice.from_json(json.loads(json.dumps(advice.to_json()))) == advice


def test_memory_does_not_grow_with_the_processes_that_came_and_went() -> None:
    scene = Scene()

    def churn(first: int, last: int) -> int:
        for number in range(first, last):
            passing = replace(IDLE, pid=1000 + number, started=float(number))
            scene.show(1, replace(CARD, processes=(BUSY, passing)), every=0.5)
        return len(pickle.dumps(scene.advisor))

    assert churn(200, tries(1000, 4000)) == pytest.approx(churn(0, 200), rel=0.05)
