"""Steps found from the calls of optimizers."""

from itertools import chain, repeat

import pytest

from hotloop.step.rounds import RECENT, Rounds


def ends(calls: str) -> str:
    rounds = Rounds()
    return "".join("|" if rounds.ends(call) else "." for call in calls)


@pytest.mark.parametrize(
    ("one_round", "settled"),
    [("a", "|"), ("dg", ".|"), ("ddddd" + "g", ".....|"), ("abc", "..|")],
    ids=["one", "two in turns", "a critic that steps more often", "three"],
)
def test_a_step_is_a_full_round(one_round: str, settled: str) -> None:
    assert ends(one_round * 6)[3 * len(one_round) :] == settled * 3


def test_an_optimizer_that_is_gone_is_not_waited_for() -> None:
    rounds = Rounds()
    for name in "ab":
        rounds.expect(name)
    assert not rounds.ends("a")
    rounds.forget("b")
    assert rounds.ends("a")


def test_an_optimizer_that_has_done_its_part_is_not_waited_for() -> None:
    calls = "".join(chain("ab", repeat("b", RECENT + 3)))
    assert ends(calls)[-3:] == "|||"
