"""Costs of operations, and the lines that they are joined with."""

import pytest

from hotloop.placement.sites import Site
from hotloop.profiling.analysis import costliest, costs, plain, waits_in
from hotloop.profiling.operation_log import LoggedOperation

from .timelines import BACKWARD, STREAM, event, mark

ONE, TWO, UPDATE, LOSS = (Site("/nowhere/net.py", line) for line in (1, 2, 3, 4))
ENGINE = "autograd::engine::evaluate_function: AddmmBackward0"


def seen(name: str, phase: str, site: Site) -> LoggedOperation:
    return LoggedOperation(name, phase, site, "2×2", 0.0, "fp32")


def lines(operations) -> dict[tuple[str, str, int | None], float]:
    return {(o.name, o.phase, o.line.line if o.line else None): o.seconds for o in operations}


def test_operations_are_joined_with_their_lines_in_order() -> None:
    events = [
        mark(0),
        event("operation", 1, 4, "aten::linear"),
        event("operation", 1.5, 4, "aten::addmm"),
        event("operation", 2, 3, "aten::copy_"),  # inside: a part of the addmm
        event("operation", 5, 7, "aten::addmm"),
        event("operation", 10, 15, ENGINE),
        event("operation", 11, 15, "aten::mm"),
        event("update", 16, 19, "Optimizer.step#SGD.step"),
        event("operation", 17, 18, "aten::add_"),
        mark(20),
    ]
    look = [
        seen("aten::addmm", "forward", ONE),
        seen("aten::addmm", "forward", TWO),
        seen("aten::mm", "backward", TWO),
        seen("aten::add_", "update", UPDATE),
    ]
    found = lines(costliest(costs(events, look), 1, 20, device=False))
    assert found == {
        ("addmm", "forward", 1): 2.5,
        ("addmm", "forward", 2): 2,
        ("mm", "backward", 2): 4,
        ("add_", "update", 3): 1,
        ("linear", "forward", 1): 0.5,  # what is left of it, at the line it was begun for
        ("AddmmBackward0", "backward", 2): 1,
    }


def test_without_a_look_the_names_are_known_and_the_lines_are_not() -> None:
    events = [mark(0), event("operation", 1, 4, "aten::linear"), event("operation", 2, 4, "aten::addmm"), mark(5)]
    assert lines(costliest(costs(events, []), 1, 5, device=False)) == {
        ("linear", "forward", None): 1,
        ("addmm", "forward", None): 2,
    }


def test_a_line_is_not_guessed_where_a_step_runs_more_than_was_seen() -> None:
    events = [mark(0), *(event("operation", at, at + 1, "aten::addmm") for at in (1, 3, 5)), mark(9)]
    twice = [seen("aten::addmm", "forward", ONE), seen("aten::addmm", "forward", TWO)]
    assert set(lines(costliest(costs(events, twice), 1, 9, device=False))) == {("addmm", "forward", None)}


@pytest.mark.parametrize(("ran", "line"), [(1, 1), (3, None), (4, 1)], ids=["fewer", "some more", "twice as many"])
def test_a_line_that_alone_was_seen_is_not_given_what_another_may_have_asked_for(ran: int, line: int | None) -> None:
    events = [mark(0), *(event("operation", at, at + 0.5, "aten::addmm") for at in range(1, ran + 1)), mark(9)]
    same = [seen("aten::addmm", "forward", ONE)] * 2
    assert set(lines(costliest(costs(events, same), 1, 9, device=False))) == {("addmm", "forward", line)}


def test_the_time_of_the_device_goes_to_the_operation_that_asked_for_it() -> None:
    events = [
        mark(0),
        event("operation", 1, 2, "aten::addmm"),
        event("call", 1.2, 1.4, "cudaLaunchKernel", link=1),
        event("operation", 2.5, 3.5, ENGINE, BACKWARD),
        event("operation", 2.6, 3.4, "aten::mm", BACKWARD),
        event("call", 3, 3.1, "cudaLaunchKernel", BACKWARD, link=2),
        event("call", 4, 4.1, "cudaGraphLaunch", link=3),
        mark(5),
        event("kernel", 2, 9, "sgemm", STREAM, link=1),
        event("kernel", 9, 12, "sgemm", STREAM, link=2),
        event("kernel", 12, 13, "void replayed<float>(int)", STREAM, link=3),
        mark(20),
        event("kernel", 21, 22, "after the steps", STREAM, link=4),
    ]
    look = [seen("aten::addmm", "forward", ONE), seen("aten::mm", "backward", ONE)]
    rows = costliest(costs(events, look), 2, 10, device=True)
    assert lines(rows) == {("addmm", "forward", 1): 3.5, ("mm", "backward", 1): 1.5, ("replayed", "", None): 0.5}
    assert rows[0].share == pytest.approx(0.35)


def test_waits_are_told_by_line() -> None:
    events = [
        mark(0),
        event("kernel", 0, 9, thread=STREAM),
        event("operation", 1, 6, "aten::item"),
        event("operation", 1, 6, "aten::_local_scalar_dense"),
        event("call", 1, 2, "cudaMemcpyAsync", link=5),
        event("wait", 2, 6, "cudaStreamSynchronize"),
        event("wait", 7, 8, "cudaDeviceSynchronize"),
        mark(10),
    ]
    look = [seen("aten::_local_scalar_dense", "forward", LOSS), seen("cudaDeviceSynchronize", "forward", TWO)]
    first, second = waits_in(costs(events, look), 1, device=True)
    assert (first.what, first.line.line, first.seconds, first.calls) == (".item() or a branch on a tensor", 4, 4, 1)
    assert (second.what, second.line.line, second.seconds) == ("torch.cuda.synchronize()", 2, 1)


def test_data_is_no_operation_of_a_cpu_step() -> None:
    events = [mark(0), event("data", 1, 4), event("operation", 2, 3, "aten::stack"), mark(5)]
    assert costliest(costs(events, []), 1, 5, device=False) == ()


def test_names_of_kernels_are_cut() -> None:
    assert plain("void at::native::elementwise_kernel<128, 2>(int)") == "at::native::elementwise_kernel"
