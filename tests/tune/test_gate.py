"""The gate: how far a plan's loss and gradient may be from fp32, and that nobody drops anything in it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop.tune.gate import Departure, rounded_weights, without_dropout

Pass = tuple[dict[str, Tensor], list[Tensor | None]]


def passed(loss: float, *gradients: Tensor | None) -> Pass:
    return {"loss": torch.tensor(loss)}, list(gradients)


PLAIN = passed(2.0, torch.tensor([3.0, 4.0]), torch.tensor([[1.0]]))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (PLAIN, None),
        (passed(2.03, torch.tensor([3.1, 3.9]), torch.tensor([[1.0]])), None),
        (passed(math.nan, torch.tensor([3.0, 4.0]), torch.tensor([[1.0]])), None),  # the gradient is what trains
        (passed(2.0, torch.tensor([math.nan, 4.0]), torch.tensor([[1.0]])), "turns"),
        (passed(2.0, torch.tensor([math.inf, 4.0]), torch.tensor([[1.0]])), "turns"),
        (passed(2.0, torch.tensor([-3.0, 4.0]), torch.tensor([[1.0]])), "turns"),
        (passed(2.0, torch.tensor([6.0, 8.0]), torch.tensor([[2.0]])), "2 times as long"),
        (passed(2.2, torch.tensor([3.5, 3.3]), torch.tensor([[1.0]])), "10.0%"),
        (passed(2.0, torch.tensor([3.0, 4.0]), None), "turns"),
        (passed(2.0, torch.zeros(2), torch.zeros(1, 1)), "turns"),
    ],
)
def test_what_passes(other: Pass, says: str | None) -> None:
    excess = Departure.between(PLAIN, other).excess()
    assert excess is None if says is None else says in (excess or "")


def test_a_loss_near_zero_is_no_reason_where_the_gradient_is_right() -> None:
    """The loss of a critic is a difference; a share of it says nothing."""
    gradient = torch.randn(100)
    assert Departure.between(passed(1e-6, gradient), passed(3e-6, gradient * 1.001)).excess() is None


def test_imaginary_parts_of_gradients_are_compared_too() -> None:
    gradient = torch.tensor([3 + 4j, 1 - 2j])
    plain = passed(1.0, gradient)
    assert Departure.between(plain, passed(1.0, (gradient * 1.001).conj().resolve_conj().conj())).excess() is None
    assert "turns" in (Departure.between(plain, passed(1.0, gradient.conj())).excess() or "")


def test_no_gradient_at_all_passes() -> None:
    nothing = passed(1.0, torch.zeros(3), None)
    assert Departure.between(nothing, nothing).excess() is None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.3
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.scale, self.attention_dropout, self.training)


def test_nothing_is_dropped_inside_and_all_is_as_it_was_afterwards() -> None:
    model = nn.Sequential(nn.Dropout(0.4), Attention(), nn.AlphaDropout(0.2))
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    x = torch.randn(8, 4)
    before = torch.get_rng_state()
    with without_dropout([model, lstm]):
        assert torch.equal(model(x), x * 0.5)
        assert torch.equal(lstm(x)[0], lstm(x)[0])
    assert (model[0].p, model[1].attention_dropout, model[2].p, lstm.dropout) == (0.4, 0.3, 0.2, 0.5)
    torch.set_rng_state(before)
    assert not torch.equal(model(x), x * 0.5)


def test_a_gradient_that_rounded_weights_turn_as_well_may_turn_further() -> None:
    plain = passed(2.0, torch.tensor([1.0, 0.0]))
    turned = Departure.between(plain, passed(2.0, torch.tensor([0.5, 0.85])))
    shaken = Departure.between(plain, passed(2.0, torch.tensor([0.8, 0.6])))
    assert "turns" in (turned.excess() or "")
    assert turned.excess(shaken=shaken) is None
    assert "turns" in (turned.excess(shaken=Departure.between(plain, plain)) or "")
    back = Departure.between(plain, passed(2.0, torch.tensor([-0.5, 0.85])))
    assert "turns" in (back.excess(shaken=shaken) or ""), "beyond a right angle it is another direction"
    unknown = Departure.between(plain, passed(2.0, torch.tensor([math.nan, 0.6])))
    assert "turns" in (turned.excess(shaken=unknown) or "")
    longer = Departure.between(plain, passed(2.0, torch.tensor([1.0, 1.7])))
    assert "times as long" in (longer.excess(shaken=shaken) or "")


def test_weights_are_rounded_for_a_while() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = [p.detach().clone() for p in model.parameters()]
    address = model[0].weight.data_ptr()
    with rounded_weights([model, model[0]], torch.bfloat16):
        for parameter, digits in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, digits.bfloat16().float())
    assert all(map(torch.equal, model.parameters(), before))
    assert model[0].weight.data_ptr() == address


def test_weights_are_as_they_were_where_memory_runs_out_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [p.detach().clone() for p in model.parameters()]
    calls, plain = [0], Tensor.to

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("planted")
        return plain(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "to", to)
    with pytest.raises(torch.OutOfMemoryError), rounded_weights([model], torch.bfloat16):
        pytest.fail("it has no room")
    monkeypatch.undo()
    assert all(map(torch.equal, model.parameters(), before))
