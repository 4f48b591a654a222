"""With values, a program goes the way that it goes on the CPU, and prints what it prints there."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from hotloop import Loop, simulate

from ..thorough import tries

PROGRAMS: list[Any] = []


@pytest.fixture(autouse=True, scope="module")
def here(built: Path):
    """The built library, and one thread: these tensors are small, and threads would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLOOP_CACHE", str(built.parent.parent))
        yield
    torch.set_num_threads(threads)


def program(function: Callable[[str], list[float]]) -> Callable[[str], list[float]]:
    PROGRAMS.append(pytest.param(function, id=function.__name__))
    return function


def learn(model: nn.Module, optimizer: Any, batch: Callable[[], tuple[Tensor, Tensor]], loss: Any) -> list[float]:
    losses = []
    for _ in range(tries(2, 4)):
        x, y = batch()
        optimizer.zero_grad()
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


class Attend(nn.Module):
    def __init__(self, width: int, heads: int, chance: float = 0.0) -> None:
        super().__init__()
        self.heads, self.chance = heads, chance
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.chance)
        return x + self.out(y.transpose(1, 2).reshape(b, t, c))


@program
def transformer(device: str) -> list[float]:
    model = nn.Sequential(nn.Embedding(20, 16), Attend(16, 4), nn.RMSNorm(16), Attend(16, 4, 0.1), nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(model.to(device).parameters(), 1e-2, fused=True)
    tokens = torch.randint(20, (3, 7)).to(device)
    return learn(model, optimizer, lambda: (tokens, tokens), lambda a, b: F.cross_entropy(a.flatten(0, 1), b.flatten()))


@program
def attention_with_masks(device: str) -> list[float]:
    q = torch.randn(2, 4, 6, 8, device=device, requires_grad=True)
    seen = (torch.rand(2, 1, 6, 6, device=device) > 0.3) | torch.eye(6, dtype=torch.bool, device=device)
    bias = torch.randn(2, 4, 6, 6, device=device, requires_grad=True)
    for mask in (seen, bias):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().sum().backward()
    return [q.grad.norm().item(), bias.grad.norm().item()]


@program
def convolutions(device: str) -> list[float]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2),
        nn.GroupNorm(2, 8), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    ).to(device, memory_format=torch.channels_last)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    losses = learn(
        model,
        optimizer,
        lambda: (torch.randn(6, 3, 8, 8).to(device), torch.randint(3, (6,)).to(device)),
        F.cross_entropy,
    )
    with torch.inference_mode():
        losses.append(model.eval()(torch.ones(2, 3, 8, 8, device=device)).sum().item())
    return losses + model[1].running_var.tolist()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.gru, self.rnn, self.cell = nn.GRU(16, 6, batch_first=True), nn.RNN(6, 5), nn.LSTMCell(5, 4)
        self.last = nn.GRUCell(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        packed, (h, c) = self.lstm(pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True))
        y, _ = self.rnn(self.gru(pad_packed_sequence(packed, batch_first=True)[0])[0])
        state = None
        for part in y.unbind(1):
            state = self.cell(part, state)
        return self.last(state[0]) + h[0, :, :2] + c[1, :, :2]


@program
def recurrence(device: str) -> list[float]:
    model = Recurrent().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2)
    return learn(
        model, optimizer, lambda: (torch.randn(3, 5, 4).to(device), torch.randint(2, (3,)).to(device)), F.cross_entropy
    )


@program
def a_search_along_lines(device: str) -> list[float]:
    w = torch.zeros(3, device=device, requires_grad=True)
    goal = torch.tensor([1.0, 2.0, 3.0], device=device)
    optimizer = torch.optim.LBFGS([w], line_search_fn="strong_wolfe")
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w - goal).square().sum() + w.pow(4).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    return losses + w.tolist()


@program
def until_it_is_good(device: str) -> list[float]:
    w = torch.full((2,), 5.0, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    loss, steps = w.square().sum(), 0
    while loss > 1e-2:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        optimizer.step()
        steps += 1
    return [steps, loss.item()]


@program
def shapes_that_depend_on_values(device: str) -> list[float]:
    x = torch.randn(10, 4, device=device)
    mask = x > 0
    values, places, counts = torch.unique((2 * x).round(), return_inverse=True, return_counts=True)
    y = x.clone()
    y[mask] = 0
    y[mask[:, 0]] += 1
    y[torch.tensor([0, 1])] = 5.0
    numbers = [x[mask].sum(), mask.nonzero().sum(), places.sum(), counts.max(), y.sum(), x.masked_select(mask).mean()]
    lists = [
        torch.bincount(torch.randint(4, (9,), device=device)),
        torch.repeat_interleave(torch.arange(3, device=device), torch.tensor([1, 0, 2], device=device)),
        x.argmax(1),
        torch.multinomial(torch.ones(5, device=device), 3),
    ]
    same = [torch.equal(x, x.clone()), torch.equal(x, y), torch.allclose(x, x + 1)]
    told = [*map(float, numbers), len(x[mask]), values.numel(), *same, *(x @ x.T).detach().cpu().numpy()[0].tolist()]
    return told + [number for each in lists for number in each.tolist()]


@program
def memory_that_is_shared(device: str) -> list[float]:
    x = torch.arange(12.0, device=device).view(3, 4)
    x[:, 1].mul_(2)
    x.t()[0].zero_()
    x.as_strided((2, 2), (4, 1)).add_(1)
    out = torch.empty(0, device=device)
    torch.add(x[:2, :3], 1, out=out)
    other = x.clone()
    other[0].copy_(torch.arange(4.0))
    x.resize_(4, 4)[3].fill_(7)
    spread = torch.ones(1, 3, device=device).expand(2, 3)
    whole = spread.contiguous()
    whole[0] += 1
    buffer = torch.zeros(5, device=device)
    buffer[1:3] = torch.tensor([1.0, 2.0])
    buffer.detach()[4] = 9
    buffer.data[0] = 3
    turned = torch.view_as_complex(torch.randn(3, 2).to(device)).conj()
    half = torch.arange(4.0, device=device).half()
    half.mul_(half).add_(half.flip(0))
    found = [
        half,
        x,
        out,
        other,
        spread,
        whole,
        buffer,
        turned.imag,
        (turned * turned).real,
        torch.fft.fft(buffer).abs(),
    ]
    return [number for each in found for number in each.flatten().tolist()]


@program
def computed_again(device: str) -> list[float]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 1)).to(device)
    losses = []
    for reentrant in (False, True):
        x = torch.randn(5, 4, device=device, requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=reentrant).square().mean()
        loss.backward()
        losses += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]
    return losses


@program
def numbers_by_chance(device: str) -> list[float]:
    generator = torch.Generator(device=device).manual_seed(5)
    drawn = [torch.rand(3, generator=generator, device=device), torch.randn(2, generator=generator, device=device)]
    drawn += [torch.randperm(4, device=device), torch.empty(2, device=device).uniform_(), torch.rand(2)]
    return [number for each in drawn for number in each.tolist()]


@program
def copies_and_files(device: str) -> list[float]:
    model = nn.Linear(2, 2).to(device)
    average = copy.deepcopy(model)
    average.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.weight.zero_()
    return [average.weight.sum().item(), model.weight.sum().item(), *average.bias.cpu().tolist()]


def both(function: Callable[[str], list[float]]) -> tuple[list[float], list[float], Any]:
    """What a program gives on the CPU, and on a simulated GPU."""
    torch.manual_seed(3)
    wanted = function("cpu")
    torch.manual_seed(3)
    with simulate("h200", values=True) as sim:
        found = function("cuda")
    return wanted, found, sim


@pytest.mark.parametrize("function", PROGRAMS)
def test_it_gives_what_the_cpu_gives(function: Callable[[str], list[float]]) -> None:
    wanted, found, sim = both(function)
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert sim.findings == ()
    assert not [note for note in sim.result.notes if "placeholder" in note]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near_to_what_the_cpu_gives(dtype: torch.dtype) -> None:
    def train(device: str) -> list[float]:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.LayerNorm(16),
            nn.Unflatten(1, (4, 4)), Attend(4, 2), nn.Flatten(),
        ).to(device)  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled=dtype == torch.float16)
        losses = []
        for _ in range(3):
            with torch.autocast(device, dtype):
                scores = model(torch.randn(4, 3, 8, 8, device=device))
                loss = F.cross_entropy(scores, torch.zeros(4, dtype=torch.long, device=device))
                loss = loss + F.softmax(scores, -1, dtype=torch.float32).square().sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    wanted, found, sim = both(train)
    assert found == pytest.approx(wanted, rel=5e-3)
    assert not [note for note in sim.result.notes if "placeholder" in note]


@pytest.mark.gpu
@pytest.mark.parametrize("function", [a_search_along_lines, until_it_is_good, memory_that_is_shared])
def test_it_gives_what_a_real_gpu_gives(function: Callable[[str], list[float]]) -> None:
    """Of programs without chance on the device, since a GPU draws other random numbers."""
    _, found, _ = both(function)
    torch.manual_seed(3)
    assert found == pytest.approx(function("cuda"), rel=1e-3)


def test_copies_waits_and_memory_are_those_of_the_simulation() -> None:
    def result(*, values: bool) -> Any:
        torch.manual_seed(0)
        with simulate("h200", values=values) as sim:
            transformer("cuda")
        return sim.result

    without, with_values = result(values=False), result(values=True)
    for name in ("peak", "categories", "copies", "syncs", "findings", "step_ms"):
        assert getattr(with_values, name) == getattr(without, name), name


def test_a_file_that_is_saved_and_loaded_holds_the_values(tmp_path: Path) -> None:
    with simulate("h200", values=True):
        x = torch.arange(3.0, device="cuda")
        torch.save({"x": x}, tmp_path / "x.pt")
        x.zero_()
        found = torch.load(tmp_path / "x.pt", map_location="cuda")["x"]
        assert found.is_cuda
        assert found.tolist() == [0.0, 1.0, 2.0]
        assert torch.load(tmp_path / "x.pt", map_location="cpu")["x"].tolist() == [0.0, 1.0, 2.0]
    assert not (tmp_path / "x.pt").exists()


def test_what_only_a_gpu_computes_is_said() -> None:
    @torch.library.custom_op("hotloop_tests::only_there", mutates_args=(), device_types="cuda")
    def only_there(x: Tensor) -> Tensor:
        return x.clone()

    only_there.register_fake(torch.empty_like)
    with simulate("h200", values=True) as sim:
        x = torch.zeros(3, device="cuda")
        assert only_there(x).isfinite().all()
        assert (x + 1).tolist() == [1.0, 1.0, 1.0]
    (note,) = [note for note in sim.result.notes if "placeholder" in note]
    assert "hotloop_tests.only_there" in note


def test_a_graph_computes_when_it_is_replayed_and_not_before() -> None:
    with simulate("h200", values=True):
        x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            doubled = x.add_(1) * 2
            drawn = torch.rand(8, device="cuda")
            with pytest.raises(RuntimeError, match="stream is capturing"):
                drawn.sum().item()
        assert x.tolist() == [0.0] * 3
        numbers = []
        for replays in (1, 2):
            graph.replay()
            numbers.append(drawn.tolist())
            assert (x.tolist(), doubled.tolist()) == ([replays] * 3, [2 * replays] * 3)
        assert numbers[0] != numbers[1]


@pytest.mark.parametrize("read", [Tensor.item, Tensor.cpu, lambda x: x.nonzero()])
def test_what_makes_the_host_wait_warns_where_pytorch_was_asked_to(read: Any) -> None:
    with simulate("h200", values=True):
        x = torch.ones((), device="cuda")
        read(x)
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            read(x)
        torch.cuda.set_sync_debug_mode("default")


def test_an_index_that_is_out_of_range_is_an_error_as_on_the_cpu() -> None:
    with pytest.raises(IndexError), simulate("h200", values=True):
        nn.Embedding(3, 2).cuda()(torch.tensor([5]).cuda())


CHANGES = [
    lambda x: x.add_(1), lambda x: x.t().mul_(2), lambda x: x[1:].zero_(), lambda x: x[:, ::2].fill_(3),
    lambda x: x[:, 1].copy_(x[:, 0]), lambda x: x.flip(0), lambda x: x.roll(1, 1).contiguous(), lambda x: x.cumsum(0),
    lambda x: x.index_fill_(0, torch.tensor([1], device=x.device), -1.0), lambda x: x.masked_fill_(x > 2, 0.5),
    lambda x: x.expand(2, 3, 4).sum(0), lambda x: x.sort(1).values, lambda x: torch.cat([x[:1], x])[:3],
    lambda x: x.unfold(1, 2, 1).sum(-1).repeat(1, 2)[:, :4], lambda x: x.transpose(0, 1).reshape(3, 4),
    lambda x: x[torch.tensor([2, 0, 1])],
]  # fmt: skip


@settings(max_examples=tries(15, 40), deadline=None)
@given(st.lists(st.integers(0, len(CHANGES) - 1), max_size=8))
def test_views_and_changes_in_place_are_as_on_the_cpu(changes: list[int]) -> None:
    def change(device: str) -> list[float]:
        first = x = torch.arange(12.0, device=device).view(3, 4)
        for number in changes:
            made = CHANGES[number](x)
            x = made if made.shape == x.shape else x
        return [*x.flatten().tolist(), *first.flatten().tolist()]

    wanted, found, _ = both(change)
    assert found == wanted


def test_a_loop_trains_on_a_simulated_gpu_with_values() -> None:
    torch.manual_seed(0)
    x = torch.rand(8, 4)
    losses = []
    with simulate("h200", values=True):
        model = nn.Linear(4, 2)
        loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cuda", plan="plain")
        for _ in range(4):
            losses.append(float(loop.step((x, x[:, :2]))))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
