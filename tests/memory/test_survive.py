"""`Survivor`: smaller pieces until it fits, everything put back, what is done stays done."""

import pytest
import torch
from torch import Tensor, nn

from hotloop.errors import DoesNotFit
from hotloop.memory.survive import Survivor

CPU = torch.device("cpu")


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_smaller_until_it_fits() -> None:
    told: list[tuple[int, int]] = []
    survivor = Survivor([], CPU, told=lambda failed, follows: told.append((failed, follows)))
    undone: list[int] = []
    sizes: list[int] = []

    def attempt(size: int) -> str:
        sizes.append(size)
        if size > 3:
            raise full()
        return "done"

    assert survivor.run(20, attempt, lambda: undone.append(1)) == "done"
    assert sizes == [20, 10, 5, 3]
    assert told == [(20, 10), (10, 5), (5, 3)]
    assert len(undone) == survivor.portion.failures == 3
    assert survivor.run(20, attempt) == "done"
    assert sizes[4:] == [3], "it is remembered"


def test_other_errors_are_raised_and_nothing_is_put_back() -> None:
    survivor = Survivor([], CPU)
    undone: list[int] = []

    def refuses(size: int) -> None:
        torch.rand(1)
        raise ValueError("mine")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"):
        survivor.run(4, refuses, lambda: undone.append(1))
    assert not undone
    assert not torch.equal(torch.get_rng_state(), before), "as plain PyTorch leaves it"
    assert survivor.portion.failures == 0


def test_relief_is_asked_once_a_single_item_does_not_fit() -> None:
    relieved: list[int] = []

    def relieve() -> bool:
        relieved.append(1)
        return len(relieved) == 1

    survivor = Survivor([nn.Linear(2, 2)], CPU, relieve=relieve)
    sizes: list[int] = []

    def attempt(size: int) -> None:
        sizes.append(size)
        if not relieved:
            raise full()

    survivor.run(4, attempt)
    assert sizes == [4, 2, 1, 1]

    def never(size: int) -> None:
        raise full()

    with pytest.raises(DoesNotFit, match=r"a single item[\s\S]*parameters 24 B[\s\S]*allocate 2.00 GiB"):
        survivor.run(4, never)


def test_what_is_done_is_not_done_again() -> None:
    survivor = Survivor([], CPU)
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

    survivor.each(11, work)
    assert done == list(range(11))
    survivor.each(0, lambda rows: done.append(rows.stop))
    assert done[-1] == 0, "a batch of nothing is computed too"


def test_random_numbers_of_an_attempt_are_drawn_again() -> None:
    survivor = Survivor([nn.Dropout()], CPU)
    drawn: list[Tensor] = []

    def work(rows: slice) -> None:
        drawn.append(torch.rand(1))
        if rows.stop - rows.start > 2:
            raise full()

    survivor.each(4, work)
    assert len(drawn) == 3
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
