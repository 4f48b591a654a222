"""A loop that calls `step` alone, as PPO does over its minibatches, gets the default plan, and nobody feels it."""

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import hotloop

STEPS = 120  # on a CPU, a plan is in use from step 112 on
OTHER = 4  # steps between two things that a person does

gpu = pytest.mark.gpu


class Actor(nn.Module):
    """A convolution, a normalisation and a head: what levers change."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        self.entropy = 0.01

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.see(x)).relu().mean((2, 3)))


def objective(model: Any, batch: Any) -> Tensor:
    x, chosen, advantage = batch
    scores = model(x).log_softmax(1)
    gained: Tensor = scores.gather(1, chosen[:, None]).squeeze(1) * advantage
    return model.entropy * (scores.exp() * scores).sum(1).mean() - gained.mean()


def minibatch(rows: int, generator: torch.Generator, device: str) -> Any:
    x = torch.randn(rows, 4, 6, 6, generator=generator)
    parts = (x, torch.randint(4, (rows,), generator=generator), x.mean((1, 2, 3)))
    return tuple(part.to(device) for part in parts)


def loop_of(plan: Any, device: str, **options: Any) -> tuple[hotloop.Loop, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Actor()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    options = {"precision": "fp32", **options}
    return hotloop.Loop(model, optimizer, objective=objective, device=device, plan=plan, **options), optimizer


def trained(
    plan: Any,
    device: str = "cpu",
    steps: int = STEPS,
    act: Callable[[hotloop.Loop, Any, int], object] = lambda loop, optimizer, number: None,
    around: Callable[[int], AbstractContextManager[object]] = lambda number: nullcontext(),
    rows: Callable[[int], int] = lambda number: 16,
) -> tuple[hotloop.Loop, list[Tensor]]:
    """A loop after so many steps by hand, and its weights."""
    loop, optimizer = loop_of(plan, device)
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        batch = minibatch(rows(number), generator, device)
        with around(number):
            loss = loop.step(batch)
        assert not loss.requires_grad
        if number % OTHER == OTHER - 1:
            act(loop, optimizer, number)
    return loop, [*loop.model.state_dict().values()]


class Trainer:
    """A class that trains, as most of them are: the objective is its method, and it holds the loop."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = Actor()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.loop = hotloop.Loop(self.model, self.optimizer, objective=self.loss, device=device, precision="fp32")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return objective(model, batch)


@pytest.mark.parametrize("in_class", [False, True])
def test_steps_by_hand_get_the_default_plan(in_class: bool) -> None:
    """What the loop counts itself is no effect of the step."""
    loop = Trainer("cpu").loop if in_class else loop_of("auto", "cpu")[0]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        loop.step(minibatch(16, generator, "cpu"))
    trials = {trial.lever: trial for trial in loop.tuning.trials}
    assert trials["fused"].verdict in ("kept", "dropped")
    assert "could not be restored" not in trials["fused"].why
    assert trials["resident"].why.startswith("batches are handed")


def test_a_few_steps_by_hand_stay_as_they_were_written() -> None:
    loop, weights = trained("auto", steps=60)
    assert loop.tuning is None
    assert all(map(torch.equal, weights, trained("plain", steps=60)[1]))


def set_rate(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9


def set_decay(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    optimizer.param_groups[0]["weight_decay"] += 0.01


def set_number(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    loop.model.entropy += 0.01


def roll_out(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.model(torch.ones(2, 4, 6, 6, device=loop.device))
    loop.model.train()


def freeze(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    loop.model.norm.eval()


def read(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    parameters_to_vector(loop.model.parameters())
    copy.deepcopy(loop.model)
    assert all(p.grad is not None for p in loop.model.parameters() if p.requires_grad)
    optimizer.zero_grad()


def replace_weight(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    loop.model.head.weight.data = loop.model.head.weight.data.clone() * 0.5


def load(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loop.model.load_state_dict({name: value * 0.9 for name, value in loop.model.state_dict().items()})


def hold_still(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    loop.model.head.bias.requires_grad_(number // 10 % 2 == 0)


def hook(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    loop.model.head.weight.register_hook(lambda gradient: gradient * 0.5)


BETWEEN: dict[str, Callable[[hotloop.Loop, Any, int], object]] = {
    each.__name__: each
    for each in (set_rate, set_decay, set_number, roll_out, freeze, read, replace_weight, load, hold_still, hook)
}


def do_in_turn(loop: hotloop.Loop, optimizer: Any, number: int) -> None:
    every = [*BETWEEN.values()]
    every[number // OTHER % len(every)](loop, optimizer, number)


def test_what_a_person_does_between_steps_stays_right() -> None:
    """Also where batches have other sizes."""
    after = 112 + OTHER * len(BETWEEN)
    runs = [
        trained(plan, "cpu", after, do_in_turn, rows=lambda number: 8 + number % 3)[1] for plan in ("plain", "auto")
    ]
    for plain, planned in zip(*runs, strict=True):
        assert torch.allclose(plain.float(), planned.float(), rtol=1e-3, atol=1e-4)


def test_nothing_is_tried_where_something_special_is_around_a_step() -> None:
    loop, _ = trained("auto", around=lambda number: torch.autocast("cpu", torch.bfloat16))
    assert loop.tuning is None


def test_nothing_is_tried_over_the_plan_of_another_loop() -> None:
    """Two loops that take turns on one model: levers of one would be in the way of the other."""
    torch.manual_seed(0)
    model = Actor()
    loops = []
    for plan in (hotloop.Plan("cpu", recompute=("see",)), "auto"):
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        loops.append(hotloop.Loop(model, optimizer, objective=objective, device="cpu", plan=plan))
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for loop in loops:
            loop.step(minibatch(8, generator, "cpu"))
    assert loops[1].tuning is None


def test_a_loop_over_batches_that_was_left_does_not_count_any_more() -> None:
    loop, _ = loop_of("auto", "cpu")
    generator = torch.Generator().manual_seed(1)
    data = [minibatch(8, generator, "cpu") for _ in range(3)]
    for batch in loop.batches(data):
        loop.step(batch)
        break
    for batch in itertools.islice(itertools.cycle(data), STEPS):
        loop.step(batch)
    assert loop.tuning is not None


# On a GPU


def captured(loop: hotloop.Loop) -> bool:
    step = loop._core.switch.step.captured
    return step is not None and step.has_captures


def step_until_captured(loop: hotloop.Loop, generator: torch.Generator) -> None:
    for _ in range(3000):
        loop.step(minibatch(16, generator, "cuda"))
        if captured(loop):
            return
    pytest.fail(f"nothing is captured: {loop.tuning}")


@gpu
@pytest.mark.parametrize("in_class", [False, True])
def test_steps_by_hand_are_captured(in_class: bool) -> None:
    loop = Trainer("cuda").loop if in_class else loop_of("auto", "cuda")[0]
    generator = torch.Generator().manual_seed(1)
    step_until_captured(loop, generator)
    for _ in range(20):
        loop.step(minibatch(16, generator, "cuda"))
        assert captured(loop), "nothing has changed"
    assert loop.tuning is not None
    assert loop.plan.graph == 1
    assert loop.plan.fused
    assert not loop.plan.channels_last, "weights stay as they lie"


@gpu
@pytest.mark.parametrize("act", BETWEEN)
def test_captured_steps_by_hand_follow_what_a_person_does(act: str) -> None:
    """In lockstep with a plain loop, from the first captured step on."""
    planned, its = loop_of("auto", "cuda")
    generator = torch.Generator().manual_seed(1)
    step_until_captured(planned, generator)
    plain, own = loop_of("plain", "cuda")
    plain.model.load_state_dict(planned.model.state_dict())
    own.load_state_dict(copy.deepcopy(its.state_dict()))
    for group in own.param_groups:
        group.update(fused=None, foreach=None, capturable=False)
    for number in range(300):
        batch = minibatch(16, generator, "cuda")
        losses = plain.step(batch), planned.step(batch)
        assert torch.allclose(*losses, rtol=1e-2, atol=1e-3), f"step {number}, {captured(planned)}"
        if number % 30 == 29:
            BETWEEN[act](plain, own, number)
            BETWEEN[act](planned, its, number)
    weights = ([*each.model.state_dict().values()] for each in (plain, planned))
    for one, other in zip(*weights, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-3)


@gpu
def test_numbers_that_change_often_end_the_captures() -> None:
    loop, optimizer = loop_of("auto", "cuda")
    generator = torch.Generator().manual_seed(1)
    for number in range(4000):
        loop.step(minibatch(16, generator, "cuda"))
        if captured(loop):
            set_number(loop, optimizer, number)
        if loop.tuning is not None and not loop.plan.graph:
            break
    assert not loop.plan.graph
    reasons = {trial.lever: trial.why for trial in loop.tuning.trials} if loop.tuning is not None else {}
    assert "changes often between steps" in reasons["graph"]


@gpu
def test_what_is_around_a_captured_step_counts() -> None:
    """Under autocast a step by hand is in bf16, whatever was captured without."""
    loop, _ = loop_of("auto", "cuda")
    generator = torch.Generator().manual_seed(1)
    step_until_captured(loop, generator)
    seen: list[torch.dtype] = []
    handle = partial(loop.model.head.register_forward_hook, lambda module, given, out: seen.append(out.dtype))
    with torch.autocast("cuda", torch.bfloat16):
        handle()
        loop.step(minibatch(16, generator, "cuda"))
    assert seen == [torch.bfloat16]
