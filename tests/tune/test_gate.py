"""The gate: how far a plan's loss and gradient may be from fp32, and that nobody drops anything in it."""

import math
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.plan import Plan
from hotloop.tune.gate import Departure, rounded_weights, stray, without_dropout

from ..zoo.trainings import DiffusionBlock

Pass = tuple[dict[str, Tensor], list[Tensor | None]]


def passed(loss: float, *gradients: Tensor | None) -> Pass:
    return {"loss": torch.tensor(loss)}, list(gradients)


PLAIN = passed(2.0, torch.tensor([3.0, 4.0]), torch.tensor([[1.0]]))
MANY = torch.linspace(-1, 1, 100)
COMPLEX = torch.tensor([3 + 4j, 1 - 2j])
NOTHING = passed(1.0, torch.zeros(3), None)


@pytest.mark.parametrize(
    ("plain", "other", "says"),
    [
        (PLAIN, PLAIN, None),
        (PLAIN, passed(2.03, torch.tensor([3.1, 3.9]), torch.tensor([[1.0]])), None),
        (PLAIN, passed(math.nan, torch.tensor([3.0, 4.0]), torch.tensor([[1.0]])), None),  # the gradient is what trains
        (PLAIN, passed(2.0, torch.tensor([math.nan, 4.0]), torch.tensor([[1.0]])), "turns"),
        (PLAIN, passed(2.0, torch.tensor([math.inf, 4.0]), torch.tensor([[1.0]])), "turns"),
        (PLAIN, passed(2.0, torch.tensor([-3.0, 4.0]), torch.tensor([[1.0]])), "turns"),
        (PLAIN, passed(2.0, torch.tensor([6.0, 8.0]), torch.tensor([[2.0]])), "2 times as long"),
        (PLAIN, passed(2.2, torch.tensor([3.5, 3.3]), torch.tensor([[1.0]])), "10.0%"),
        (PLAIN, passed(2.0, torch.tensor([3.0, 4.0]), None), "turns"),
        (PLAIN, passed(2.0, torch.zeros(2), torch.zeros(1, 1)), "turns"),
        # The loss of a critic is a difference near zero; a share of it says nothing where the gradient is right.
        (passed(1e-6, MANY), passed(3e-6, MANY * 1.001), None),
        (passed(1.0, COMPLEX), passed(1.0, (COMPLEX * 1.001).conj().resolve_conj().conj()), None),
        (passed(1.0, COMPLEX), passed(1.0, COMPLEX.conj()), "turns"),
        (NOTHING, NOTHING, None),
    ],
)
def test_what_passes(plain: Pass, other: Pass, says: str | None) -> None:
    excess = Departure.between(plain, other).excess()
    assert excess is None if says is None else says in (excess or "")


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
    with rounded_weights([model, model[0]], 8):
        for parameter, digits in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, digits.bfloat16().float())
    assert all(map(torch.equal, model.parameters(), before))
    assert model[0].weight.data_ptr() == address


def test_weights_are_as_they_were_where_memory_runs_out_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [p.detach().clone() for p in model.parameters()]
    calls, plain = [0], Tensor.__sub__

    def subtract(tensor: Tensor, other: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("planted")
        return plain(tensor, other)

    monkeypatch.setattr(Tensor, "__sub__", subtract)
    with pytest.raises(torch.OutOfMemoryError), rounded_weights([model], 8):
        pytest.fail("it has no room")
    monkeypatch.undo()
    assert all(map(torch.equal, model.parameters(), before))


class Scaled(nn.Module):
    """Compiled, where it is `wrong`, the gradient of its few scales comes out in another order."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.head = nn.Linear(16, 1)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        if self.wrong and torch.compiler.is_compiling():
            scale = scale.detach() + (scale - scale.detach()).flip(0)
        return self.head(self.layers(x) * scale)


def gradients(model: nn.Module, x: Tensor) -> Pass:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return {"loss": loss.detach()}, [p.grad for p in model.parameters()]


def disturbed(size: float) -> Pass:
    """The gradients of weights that have each been moved by a part of themselves."""
    torch.manual_seed(0)
    model = Scaled(wrong=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape))
    return gradients(model, torch.linspace(-1, 1, 64).view(8, 8))


def strays(other: Pass, moved: Pass | None = None, *, random: bool = False) -> str | None:
    model = Scaled(wrong=False)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), plan=Plan("cpu"))
    return stray(loop._core.switch.step, disturbed(0.0), other, lambda: moved, random=random)


def test_a_gradient_that_is_near_at_every_parameter_passes() -> None:
    assert strays(disturbed(0.0)) is None
    assert strays(disturbed(1e-5)) is None
    assert strays(disturbed(0.3), disturbed(0.2)) is None, "rounding moves it as far"
    assert strays(disturbed(0.3), disturbed(0.31), random=True) is None


@pytest.mark.parametrize("place", range(5))
def test_one_parameter_with_another_gradient_does_not_pass(place: int) -> None:
    names = [name for name, _ in Scaled(wrong=False).named_parameters()]
    changes = [lambda g: g.flip(g.dim() - 1), lambda g: g * 0, lambda g: g * 1.5, lambda g: g * math.nan]
    for change in changes[1 if names[place] == "head.bias" else 0 :]:
        losses, found = disturbed(0.0)
        found[place] = change(found[place])
        assert f"the gradient of {names[place]} is" in (strays((losses, found), disturbed(1e-4)) or "")
        assert f"the gradient of {names[place]} is" in (strays((losses, found)) or ""), "nothing is known of rounding"


def test_where_other_numbers_were_drawn_a_small_garbage_is_seen_and_chance_is_not() -> None:
    losses, found = disturbed(0.0)
    garbage = losses, [found[0].flip(0), *found[1:]]
    assert "the gradient of scale is" in (strays(garbage, disturbed(0.1), random=True) or "")
    for place, moved in ((4, 1e-9), (0, 1.0)):  # of a single number, one other draw tells nothing
        other = [gradient.clone() for gradient in found]
        other[place] *= 1.5
        drawn = [gradient * (1 + moved) for gradient in found]
        assert strays((losses, other), (losses, drawn), random=True) is None
    assert strays(({"loss": losses["loss"] * 1.2}, found), (losses, found), random=True) is None
    assert "the loss is" in (strays(({"loss": losses["loss"] * 1.3}, found), (losses, found), random=True) or "")


def test_another_loss_does_not_pass_and_no_gradient_is_a_gradient_of_zero() -> None:
    losses, found = disturbed(0.0)
    assert "the loss is 0.5 of itself away" in (strays(({"loss": losses["loss"] * 1.5}, found)) or "")
    assert "the gradient of scale is 1 of itself away" in (strays((losses, [None, *found[1:]])) or "")


def test_a_sparse_gradient_is_compared_with_a_dense_one() -> None:
    model = nn.EmbeddingBag(8, 2, sparse=True)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), plan=Plan("cpu"))
    gradient = torch.zeros(8, 2)
    gradient[[1, 5]] = 1.0
    one = torch.tensor(1.0)
    eager = {"loss": one}, [gradient.to_sparse(1)]
    assert stray(loop._core.switch.step, eager, ({"loss": one}, [gradient]), lambda: None) is None
    assert "weight" in (
        stray(loop._core.switch.step, eager, ({"loss": one}, [gradient.flip(0).to_sparse(1)]), lambda: None) or ""
    )
    assert "weight" in (stray(loop._core.switch.step, eager, ({"loss": one}, [gradient * 2]), lambda: None) or "")


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_what_is_compiled_with_one_wrong_gradient_is_dropped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.tune.course.HELD_UP", 0.03)  # as it is for a person
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Scaled(wrong=True)
    x = torch.rand(512, 8)
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cpu")
    tried: list[Any] = []

    def enough(record: Any) -> str | None:
        known = () if loop.tuning is None else loop.tuning.trials
        tried[:] = [trial for trial in known if trial.lever == "compile" and trial.verdict != "not tried"]
        return "stop" if tried or record.epoch.number > 1000 else None

    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    loop.fit(loader, epochs=10**6, on_epoch=enough, progress=False)  # so long that a compilation may pay
    (trial,) = tried
    assert "the gradient of scale is" in trial.why
    assert loop.plan.compile == "off"


class Modulated(nn.Module):
    """Two normalisations in a row, their shifts and scales chunks of one projection of the conditioning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, second_shift, second_scale = self.modulation(condition).unsqueeze(1).chunk(4, dim=-1)
        x = nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return nn.functional.layer_norm(x, x.shape[-1:]) * (1 + second_scale) + second_shift


class Diffusion(nn.Module):
    """Blocks of 1,024 channels."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 1024)
        self.blocks = nn.ModuleList(kind(1024) for _ in range(2))
        self.head = nn.Linear(1024, 8)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, condition = self.embed(batch[0]), batch[1]
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


def worst(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """How far the gradient of one parameter is away, as a part of itself."""
    return float(torch.stack([(found[name] - right[name]).norm() / right[name].norm() for name in right]).max())


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize(("kind", "precision"), [(Modulated, "fp32"), (Modulated, "bf16"), (DiffusionBlock, "bf16")])
def test_a_diffusion_block_trains_every_parameter_whatever_the_compiler_does(kind: Any, precision: Any) -> None:
    """PyTorch 2.11 compiles the projection of one sample's conditioning to a gradient that is 160 times its length."""
    torch.manual_seed(0)
    model = Diffusion(kind).cuda()
    batch = torch.randn(1, 16_384, 16, device="cuda"), torch.randn(1, 1024, device="cuda")
    target = torch.randn(1, 16_384, 8, device="cuda")

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch).float() - target).square().mean()

    def gradients_of(call: Any) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            objective(call, batch).backward()
        return {name: p.grad.double() for name, p in model.named_parameters()}

    right = gradients_of(model)
    is_broken = not worst(gradients_of(torch.compile(model)), right) <= 0.5
    torch.compiler.reset()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 2**-4), objective=objective, precision=precision)
    tuning = loop.tune([batch] * 4, steps=10**8)
    (trial,) = (trial for trial in tuning.trials if trial.lever == "compile")
    before = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    loop.step(batch)
    moved = {name: (before[name] - p.detach().double()) * 2**4 for name, p in model.named_parameters()}
    assert worst(moved, right) < 0.5, trial
    assert is_broken or "the gradient of" not in trial.why, trial
