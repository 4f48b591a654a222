"""`survive_oom` in a loop of one's own: the gradient of the whole batch, added to what is there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotloop.errors import BadArgument, DoesNotFit
from hotloop.step.survive import survive_oom

pytestmark = pytest.mark.usefixtures("light_heap")


class Picky(nn.Module):
    """A network that runs out of memory with more than so many items at once."""

    def __init__(self, most: float = 100, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if len(x) > self.most:
            if torch.is_grad_enabled() and len(x) % 2:
                out.register_hook(_run_out)
                return out
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out


def _run_out(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory in the backward pass")


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(size))
    return x, x[:, :3].argmax(1)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 17), min_size=1, max_size=4), st.integers(1, 9), st.sampled_from(["mean", "sum"]))
def test_the_gradient_of_whole_batches_is_added_up(sizes: list[int], most: int, reduction: str) -> None:
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    plain, picky = Picky(), Picky(most)
    backward = survive_oom(picky, criterion)
    for size in sizes:
        batch = batch_of(size)
        expected = criterion(plain(batch[0]), batch[1])
        expected.backward()
        loss = backward(batch)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(picky), gradients(plain), rtol=1e-4, atol=1e-6)
    assert (backward.failures > 0) == (max(sizes) > most)
    assert backward.micro_batch is None or backward.micro_batch <= most


def test_without_a_failure_it_is_backward_to_the_bit() -> None:
    plain, ours = Picky(dropout=0.5), Picky(dropout=0.5)
    backward = survive_oom(ours, loss=nn.CrossEntropyLoss())
    results = []
    for model in (plain, ours):
        torch.manual_seed(3)
        for size in (8, 5, 8):
            x, y = batch_of(size)
            if model is plain:
                F.cross_entropy(model(x), y).backward()
            else:
                backward((x, y))
        results.append([*gradients(model), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_the_weight_that_an_objective_returns() -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=0), (batch[1] > 0).sum()

    x, y = batch_of(12)
    y[4:9] = 0
    plain, picky = Picky(), Picky(2)
    loss, _ = objective(plain, (x, y))
    loss.backward()
    ours = survive_oom(picky, objective=objective)((x, y))
    torch.testing.assert_close(ours, loss.detach())
    torch.testing.assert_close(gradients(picky), gradients(plain), rtol=1e-4, atol=1e-6)


def test_gradients_are_as_they_were_when_it_fails_for_good() -> None:
    model = Picky()
    backward = survive_oom(model, nn.CrossEntropyLoss())
    backward(batch_of(4))
    before = gradients(model)
    model.most = 0
    with pytest.raises(DoesNotFit, match="a single item does not fit"):
        backward(batch_of(5))
    assert all(map(torch.equal, gradients(model), before))
    with pytest.raises(RuntimeError, match="shapes"):
        backward((torch.zeros(2, 5), torch.zeros(2)))
    assert all(map(torch.equal, gradients(model), before))


def test_sparse_gradients_and_weights_that_a_batch_does_not_reach() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(5, 2, sparse=True)
            self.unused = nn.Parameter(torch.ones(1))

    def objective(model: Any, batch: Tensor) -> Tensor:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("full")
        return model.table(batch).square().mean()

    model = Table()
    backward = survive_oom(model, objective=objective)
    model.unused.grad = torch.full((1,), 7.0)
    for _ in range(2):
        backward(torch.tensor([0, 1, 1, 4]))
    assert model.unused.grad.tolist() == [7.0]
    plain = Table()
    for _ in range(2):
        plain.table(torch.tensor([0, 1, 1, 4])).square().mean().backward()
    torch.testing.assert_close(model.table.weight.grad.to_dense(), plain.table.weight.grad.to_dense())


def test_labels_may_be_taken_out_of_the_batch() -> None:
    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(model(batch["x"]), labels)

    x, y = batch_of(8)
    backward = survive_oom(Picky(3), objective=objective)
    backward({"x": x, "labels": y})
    assert backward.micro_batch == 2


def test_a_criterion_that_learns_has_gradients_too() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output * self.scale, target)

    results = []
    for most in (100, 3):
        criterion = Weighted()
        survive_oom(Picky(most), criterion)(batch_of(9))
        results.append(criterion.scale.grad)
    torch.testing.assert_close(*results)


def test_both_a_loss_and_an_objective() -> None:
    with pytest.raises(BadArgument, match="both"):
        survive_oom(Picky(), nn.CrossEntropyLoss(), objective=lambda model, batch: batch)


@pytest.mark.gpu
def test_on_a_gpu_that_is_too_small() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x[:, None, :].repeat(1, 2**14, 1).tanh().sigmoid().mean(1))

    x = torch.randn(64, 64, device="cuda")
    batch = (x, x[:, :3].argmax(1))
    plain, ours = Wide().cuda(), Wide().cuda()
    expected = F.cross_entropy(plain(x), batch[1])
    expected.backward()
    backward = survive_oom(ours, nn.CrossEntropyLoss())
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 400 * 2**20) / total)
    try:
        loss = backward(batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert backward.failures > 0
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.linear.weight.grad, plain.linear.weight.grad, rtol=1e-3, atol=1e-5)
