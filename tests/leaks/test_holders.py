"""Who holds an object."""

import weakref

import torch

from hotloop.apps.leaks.holders import holder_of


def test_a_look_at_who_holds_it_does_not_hold_it() -> None:
    big = torch.zeros(2**10)
    gone = weakref.ref(big)
    name = "test_a_look_at_who_holds_it_does_not_hold_it"
    assert str(holder_of(big, set())) == f"`big`, a local of `{name}`"
    del big
    assert gone() is None


def test_what_locals_gave_out_stays_whole() -> None:
    big = torch.zeros(2**10)
    mine = locals()
    assert holder_of(big, set()) is not None
    assert mine["big"] is big
