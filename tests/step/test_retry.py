"""`OomRetry`: smaller micro-batches until it fits, everything restored, what is done stays done."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hotloop.errors import DoesNotFit
from hotloop.step.retry import OomRetry, OutOfMemory, in_rows, nothing

CPU = torch.device("cpu")


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def attempts(
    attempt: Callable[[int], object], memory: OutOfMemory, undo: Callable[[], None] = nothing
) -> Callable[[int], object]:
    """`attempt(size)` for a number of items, with as many of them at once as fit."""
    return OomRetry(lambda items, size: attempt(size or items), memory, int, undo)


def test_smaller_until_it_fits() -> None:
    told: list[tuple[int, int]] = []
    memory = OutOfMemory([], CPU, told=lambda failed, follows: told.append((failed, follows)))
    undone: list[int] = []
    sizes: list[int] = []

    def attempt(size: int) -> str:
        sizes.append(size)
        if size > 3:
            raise full()
        return "done"

    assert attempts(attempt, memory, lambda: undone.append(1))(20) == "done"
    assert sizes == [20, 10, 5, 3]
    assert told == [(20, 10), (10, 5), (5, 3)]
    assert len(undone) == memory.portion.failures == 3
    assert attempts(attempt, memory)(20) == "done"
    assert sizes[4:] == [3], "it is remembered"


def test_other_errors_are_raised_and_rng_states_stay() -> None:
    memory = OutOfMemory([], CPU)
    undone: list[int] = []

    def refuses(size: int) -> None:
        torch.rand(1)
        raise ValueError("mine")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"):
        attempts(refuses, memory, lambda: undone.append(1))(4)
    assert undone == [1], "a batch that is refused leaves no gradients"
    assert not torch.equal(torch.get_rng_state(), before), "as plain PyTorch leaves it"
    assert memory.portion.failures == 0


def test_relief_is_asked_once_a_single_item_does_not_fit() -> None:
    relieved: list[int] = []

    def relieve() -> bool:
        relieved.append(1)
        return len(relieved) == 1

    memory = OutOfMemory([nn.Linear(2, 2)], CPU, relieve=relieve)
    sizes: list[int] = []

    def attempt(size: int) -> None:
        sizes.append(size)
        if not relieved:
            raise full()

    attempts(attempt, memory)(4)
    assert sizes == [4, 2, 1, 1]

    def never(size: int) -> None:
        raise full()

    with pytest.raises(DoesNotFit, match=r"a single item[\s\S]*parameters 24 B[\s\S]*allocate 2.00 GiB"):
        attempts(never, memory)(4)


def test_what_is_done_is_not_done_again() -> None:
    memory = OutOfMemory([], CPU)
    done: list[int] = []
    room = [4]
    spoilt: list[int] = []

    def work(rows: slice) -> None:
        if rows.stop - rows.start > room[0]:
            raise full()
        done.extend(range(rows.start, rows.stop))
        if rows.start >= 4 and not spoilt:  # it becomes less in the middle
            spoilt.append(1)
            room[0] = 2
            del done[rows.start :]
            raise full()

    in_rows(work, 11, memory)
    assert done == list(range(11))
    in_rows(lambda rows: done.append(rows.stop), 0, memory)
    assert done[-1] == 0, "a batch of nothing is computed too"


def test_random_numbers_of_an_attempt_are_drawn_again() -> None:
    drawn: list[Tensor] = []

    def work(rows: slice) -> None:
        drawn.append(torch.rand(1))
        if rows.stop - rows.start > 2:
            raise full()

    in_rows(work, 4, OutOfMemory([nn.Dropout()], CPU))
    assert len(drawn) == 3
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_a_copy_of_the_batch_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, gave_way = OutOfMemory([], CPU), []
    memory.give_way = lambda: gave_way.append(True)
    take = memory.snapshot.take

    def no_room(batch: object = None) -> None:
        if batch is not None:
            raise full()
        take()

    monkeypatch.setattr(memory.snapshot, "take", no_room)
    assert OomRetry(lambda batch, size: batch, memory, int)(5) == 5
    assert gave_way
