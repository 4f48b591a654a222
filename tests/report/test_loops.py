"""Training loops that were timed, as words, a table, a picture and a page."""

from io import StringIO

from rich.console import Console

from hotloop.profiling.pace import LoopPace
from hotloop.report.loops import LoopsTimed, loops_page, loops_run, loops_table, loops_words

CPU = (
    LoopPace("cpu", "tutorial", (90.0, 100.0, 110.0), ("fp32",)),
    LoopPace("cpu", "fit", (200.0,), ("fp32", "fused")),
)
GPU = (
    LoopPace("cuda:0", "tutorial", (1000.0,), ("fp32",)),
    LoopPace("cuda:0", "fit", (8000.0, 8100.0, 8200.0), ("bf16", "CUDA graph")),
)
NAMES = {"cpu": "a CPU", "cuda:0": "a GPU"}


def made(*paces: LoopPace) -> LoopsTimed:
    devices = {each.device: NAMES[each.device] for each in paces}
    return LoopsTimed("Net", 10.0, paces, devices, "2026-01-01T00:00:00+00:00", {"torch": "2"})


def shown(timed: LoopsTimed) -> str:
    console = Console(width=140, file=StringIO())
    with console.capture() as printed:
        console.print(loops_table(timed).in_terminal(wraps=(6,)))
    return printed.get()


def test_the_answer_compares_with_the_tutorials_loop_here_and_on_the_cpu() -> None:
    assert loops_words(made(*CPU, *GPU)) == (
        "loop.fit on cuda:0: 8,100 items/s, 8.10× the tutorial's loop there, 81.0× the tutorial's loop on the CPU"
    )
    assert loops_words(made(*CPU)) == "loop.fit on cpu: 200 items/s, 2.00× the tutorial's loop there"
    assert loops_words(made(CPU[0], LoopPace("cpu", "fit", (50.0,)))) == "as in tutorials on cpu: 100 items/s"
    assert loops_words(made(LoopPace("cpu", "fit", failure="no"))) == "no loop could be timed"


def test_the_table_has_a_row_for_each_and_says_what_failed() -> None:
    failed = LoopPace("cuda:0", "tutorial", failure="CUDA out of memory")
    text = shown(made(*CPU, failed, GPU[1]))
    for words in ("× CPU", "10%", "81.0×", "bf16, CUDA graph", "CUDA out of memory"):
        assert words in text
    assert "× CPU" not in shown(made(*CPU))


def test_page_and_entry() -> None:
    timed = made(*CPU, *GPU)
    page = loops_page(timed, "hotloop bench train.py:build")
    for words in ("hotloop bench train.py:build", "8,100 items/s", "a GPU", "plans for a run of 10 s"):
        assert words in page
    assert "failed" in loops_page(made(LoopPace("cpu", "fit", failure="no")))
    run = loops_run(timed)
    assert (run.kind, run.figures["cuda:0, loop.fit: items per second"]) == ("bench", 8100.0)
    assert LoopsTimed.from_json(timed.to_json()) == timed
