"""`survive_oom` in a loop of one's own: the gradient of the whole batch, added to what is there."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotloop.errors import DoesNotFit
from hotloop.step.retry import OomRetry, OutOfMemory
from hotloop.step.survive import survive_oom

from ..run.test_memory import Wide, big, capped
from ..thorough import tries

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


@settings(deadline=None, max_examples=tries(15, 40))
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


def test_a_copy_of_the_batch_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, gave_way = OutOfMemory([], torch.device("cpu")), []
    memory.give_way = lambda: gave_way.append(True)
    take = memory.snapshot.take

    def no_room(batch: object = None) -> None:
        if batch is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        take()

    monkeypatch.setattr(memory.snapshot, "take", no_room)
    assert OomRetry(lambda batch, size: batch, memory, int)(5) == 5
    assert gave_way


@pytest.mark.gpu
def test_on_a_gpu_that_is_too_small() -> None:
    x, y = (tensor.cuda() for tensor in big(64).tensors)
    plain, ours = Wide().cuda(), Wide().cuda()
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    backward = survive_oom(ours, nn.CrossEntropyLoss())
    with capped(400):
        loss = backward((x, y))
    assert backward.failures > 0
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.head.weight.grad, plain.head.weight.grad, rtol=1e-3, atol=1e-5)
