"""Small tensors of the host that a step needs on the device: made there, exactly, without a wait."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.placement.waits import waits
from hotloop.step.constants import filled, made_on_device
from hotloop.step.dispatching import FEW_NUMBERS
from hotloop.step.inspection import Inspection, host_noted

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


@settings(deadline=None)
@given(
    numbers=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=FEW_NUMBERS),
    kind=st.sampled_from(TYPES),
    column=st.booleans(),
)
def test_it_has_the_same_numbers_to_the_bit(numbers: list[float], kind: torch.dtype, column: bool) -> None:
    source = torch.tensor(numbers, dtype=torch.float64).to(kind)
    source = source[:, None] if column else source
    made = filled(source, torch.device("cpu"))
    assert made.dtype == source.dtype
    assert made.shape == source.shape
    both = [each.view(torch.uint8) if each.numel() else each for each in (made.flatten(), source.flatten())]
    is_nan = source.flatten().isnan().any()  # which has several ways to be written
    assert torch.equal(*both) or is_nan
    torch.testing.assert_close(made, source, rtol=0, atol=0, equal_nan=True)


def test_large_whole_numbers_stay_exact() -> None:
    source = torch.tensor([2**62 + 1, -(2**53) - 1, 7])
    assert torch.equal(filled(source, torch.device("cpu")), source)


def test_other_tensors_are_made_as_ever() -> None:
    before = torch.tensor
    with made_on_device():
        assert torch.equal(torch.tensor([1.0, 2.0]), torch.ones(2).cumsum(0))
        assert torch.tensor([1.0], requires_grad=True).requires_grad
        assert torch.tensor(3, device="cpu", dtype=torch.int8).dtype == torch.int8
        with pytest.raises(TypeError, match="colour"):
            torch.tensor([1.0], colour=3)
    assert torch.tensor is before


def test_it_ends_with_the_last_of_several_threads() -> None:
    before = torch.tensor
    first, second = made_on_device(), made_on_device()
    entered, left = Event(), Event()

    def other() -> None:
        with second:
            entered.set()
            left.wait(10)

    with ThreadPoolExecutor() as pool:
        with first:
            waiting = pool.submit(other)
            assert entered.wait(10)
        assert torch.tensor is not before
        left.set()
        waiting.result()
    assert torch.tensor is before


gpu = pytest.mark.gpu
MAKERS: dict[str, Callable[[Any], Tensor]] = {
    "list": lambda x: torch.tensor([0.5, 2.0, 1.0], device=x.device),
    "number": lambda x: torch.tensor(0.25, device="cuda"),
    "to": lambda x: torch.tensor([1, 2, 3]).to(x.device),
    "cuda": lambda x: torch.tensor([math.pi]).cuda(),
    "type": lambda x: torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64).to(x.device, torch.float16),
    "parts": lambda x: torch.tensor([[0.1], [0.2]]).to(x),
    "gradient": lambda x: torch.tensor(2.0, device=0, requires_grad=True),
}


@gpu
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_on_a_gpu_it_is_the_same_tensor_without_a_wait(make: Callable[[Any], Tensor]) -> None:
    x = torch.ones(3, device="cuda")
    expected = make(x)
    with waits() as before:
        make(x)
    assert len(before) == 1
    with waits() as seen, made_on_device():
        made = make(x)
    assert len(seen) == 0
    assert (made.dtype, made.device, made.requires_grad) == (expected.dtype, expected.device, expected.requires_grad)
    assert torch.equal(made, expected)


@gpu
def test_on_a_gpu_data_is_still_copied() -> None:
    with waits() as seen, made_on_device():
        torch.randn(FEW_NUMBERS + 1).cuda()
    assert len(seen) == 1


class Normalised(nn.Module):
    """Makes its constants anew in each pass, as much code does."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.tensor([0.1, 0.2, 0.3, 0.4], device=x.device)
        return self.layer(x - mean) * torch.tensor(self.scale).to(x.device)


def trained(model: nn.Module, graph: int, epochs: int = 3, **options: Any) -> hotloop.Loop:
    x = torch.randn(16 * 24, 4, generator=torch.Generator().manual_seed(1))
    plan = hotloop.Plan("cuda", graph=graph, stream="resident", fused=True)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.MSELoss(), device="cuda", plan=plan)
    loader = DataLoader(TensorDataset(x, x.flip(1)), 16)
    loop.fit(loader, epochs=epochs, progress=False, monitor=False, **options)
    return loop


def scaled(batch: Any) -> Any:
    return [batch[0] / torch.tensor([1.0, 2.0, 3.0, 4.0], device=batch[0].device), batch[1]]


@gpu
@pytest.mark.parametrize("graph", [1, 8])
@pytest.mark.parametrize("options", [{}, {"device_transform": scaled}], ids=["step", "transform"])
def test_on_a_gpu_such_a_step_is_captured_and_trains_the_same(graph: int, options: dict[str, Any]) -> None:
    def run(graph: int) -> Tensor:
        model = Normalised()
        assert trained(model, graph, **options).plan.graph == graph
        return model.layer.weight.detach().clone()

    assert torch.equal(run(graph), run(0))


@gpu
def test_on_a_gpu_a_constant_that_another_epoch_changes_is_captured_again() -> None:
    def run(graph: int) -> Tensor:
        model = Normalised()
        x = torch.randn(16 * 24, 4, generator=torch.Generator().manual_seed(1))
        plan = hotloop.Plan("cuda", graph=graph, stream="resident", fused=True)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.MSELoss(), device="cuda", plan=plan)
        for epoch in range(3):
            model.scale = 1.0 + epoch
            loop.fit(DataLoader(TensorDataset(x, x.flip(1)), 16), epochs=1, progress=False, monitor=False)
        return model.layer.weight.detach().clone()

    assert torch.equal(run(1), run(0))


@gpu
def test_on_a_gpu_a_number_that_differs_in_each_pass_is_not_captured() -> None:
    class Counting(Normalised):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.tensor(1.0 + 1e-4 * next(numbers), device=x.device)

    numbers = iter(range(1, 10_000))
    with pytest.warns(hotloop.errors.PlanWarning):
        assert trained(Counting(), 1, epochs=1).plan.graph == 0


@gpu
def test_on_a_gpu_the_look_of_the_tuner_sees_no_wait() -> None:
    model, seen = Normalised().cuda(), Inspection()
    with host_noted(torch.device("cuda"), seen):
        model(torch.ones(2, 4, device="cuda"))
    assert len(seen.waits) == 0
