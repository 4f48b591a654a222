"""Ranks that were measured and GPUs that were modelled, as a table and as a picture."""

from io import StringIO

from rich.console import Console

from harness.scaling_charts import scaling_picture, scaling_table
from harness.scaling_records import DDP, LOOP, MeasuredRanks, ModelledRanks, Repeats, ScalingBenchmark
from hotloop.apps.simulate.scaling import Cluster, GradientReady, RankStep, cluster, fitted, scaled

STEP = RankStep(0.1, 0.2, 0.01, (GradientReady(20_000_000, 1.0),), units=512.0)
LINE = fitted(2, [1000, 1_000_000], [0.001, 0.002])


def ranks(number: int, way: str, seconds: float) -> MeasuredRanks:
    found = MeasuredRanks(
        ranks=number,
        way=way,
        step=Repeats(seconds, 0.9 * seconds, 1.1 * seconds),
        rate=Repeats(number * 512 / seconds, number * 500 / seconds, number * 530 / seconds),
        efficiency=Repeats(0.31 / seconds, 0.28 / seconds, 0.33 / seconds),
    )
    if number == 1 or way == LOOP:
        return found
    predicted = scaled(STEP, Cluster(LINE.link), number, overlap=0.0)
    return MeasuredRanks(
        **{**vars(found), "unsynced": Repeats(0.32, 0.31, 0.33), "communication": Repeats(0.02, -0.01, 0.03)}
        | {"predicted": predicted}
    )


FOUND = ScalingBenchmark(
    hardware="a machine",
    command="python -m harness --scaling",
    date="2026-01-01T00:00:00+00:00",
    commit=None,
    versions={},
    workload="gpt",
    device="cpu",
    backend="gloo",
    unit="tokens",
    threads=1,
    cores=2,
    repeats=3,
    overlap=0.0,
    others=0.01,
    step=STEP,
    measured=(ranks(1, DDP, 0.31), ranks(2, DDP, 0.34), ranks(1, LOOP, 0.31), ranks(2, LOOP, 0.34)),
    fits=(LINE,),
    modelled=tuple(
        ModelledRanks(way, joined, tuple(scaled(STEP, joined, n, way) for n in (2, 1024)))
        for joined in (cluster("nvlink4"), cluster("ethernet10"))
        for way in ("ddp", "fsdp")
    ),
    failures=("2 ranks: no [bold]\x1b[2J",),
)


def words(found: ScalingBenchmark) -> str:
    console = Console(width=120, file=StringIO(), record=True)
    console.print(scaling_table(found))
    return " ".join(console.export_text().split())


def test_measured_predicted_and_modelled_stand_apart() -> None:
    said = words(FOUND)
    assert "gpt · cpu · gloo · tokens · 1 thread each" in said
    assert "2 DDP 3,012" in said
    assert "91.2%" in said  # measured
    assert f"{FOUND.measured[1].predicted.efficiency:.1%}" in said  # type: ignore[union-attr]
    assert f"{100 * FOUND.measured[1].error:+.1f}" in said  # type: ignore[operator]
    assert "communication takes 20 ms of a step (0 µs to 30 ms)" in said
    assert "all-reduce of 2 ranks: 999 µs + bytes / 0.999 GB/s" in said
    assert "Modelled, not measured" in said
    assert "1,024" in said
    assert "no figures to quote" not in said
    assert "other programs" not in said
    assert "\x1b[2J" not in said


def test_a_machine_that_was_busy_is_told() -> None:
    assert "other programs used 40% of the cores" in words(ScalingBenchmark(**{**vars(FOUND), "others": 0.4}))


def test_a_quick_run_says_so() -> None:
    assert "no figures to quote" in words(ScalingBenchmark(**{**vars(FOUND), "quick": True}))


def test_the_picture_is_drawn_the_same_each_time() -> None:
    first, second = (scaling_picture(FOUND) for _ in range(2))
    assert first == second
    assert min(len(first), len(scaling_picture(FOUND, form="svg"))) > 10_000
