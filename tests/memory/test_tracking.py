"""Tracking: bytes that can be computed by hand, phases in their order, and training that does not notice."""

import gc
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hotloop.errors import BadArgument
from hotloop.memory.tracking import POINTS, Track, thinned, track

ROWS = 32


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1))


def one_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def saved(record: Track) -> dict[str, int]:
    return {module.name: module.saved for module in record.modules if module.saved}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v)


class Transformer(nn.Module):
    def __init__(self, words: int = 50, width: int = 16, *, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(3))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self._again = again

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._again else block(x)
        return self.head(x)


def transformer_record(*, again: bool = False) -> Track:
    torch.manual_seed(0)
    model, ids = Transformer(again=again), torch.randint(50, (4, 24))
    optimizer = torch.optim.AdamW(model.parameters())
    with track(model) as seen:
        for _ in range(2):
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.record()


def test_what_a_known_network_keeps_is_exact() -> None:
    model, x = mlp(), torch.randn(ROWS, 16)
    with track(model) as seen:
        one_step(model, x)
    record = seen.record()
    assert saved(record) == {"1": ROWS * 64 * 4, "3": ROWS * 8 * 4}  # what ReLU and Tanh gave; the rest is views
    assert record.kept["activations"] == ROWS * (64 + 8) * 4
    assert record.kept["inputs"] == x.nbytes
    assert record.kept["parameters"] == 4 * (64 * 8 + 8)  # the weights that a gradient has to pass


def test_what_is_kept_is_that_of_one_step_however_many_run() -> None:
    model, x, optimizer = mlp(), torch.randn(ROWS, 16), torch.optim.Adam
    learner = optimizer(model.parameters())
    with track(model) as seen:
        for _ in range(4):
            output = model(x)
            (output * output).sum().backward()  # `output` lives on into the next step, in which it is not kept
            learner.step()
            learner.zero_grad()
    assert seen.record().kept["activations"] == ROWS * (64 + 8 + 1) * 4


def test_the_peak_of_a_plain_sum_is_exact() -> None:
    model, x = nn.Linear(16, 8, bias=False), torch.randn(1000, 16)
    with track(model) as seen:
        before = seen.record().peak
        y = model(x)
        kept = y * 2
        del y
        (kept * 3).sum()
    record = seen.record()
    result = 1000 * 8 * 4
    assert record.peak - before == 2 * result + 4  # two results at a time, and the sum
    assert record.timeline[-1][1] - before == result  # only `kept` remains
    assert {module.name: module.forward_peak for module in record.modules}["(Linear)"] == result


def test_phases_come_in_their_order_and_each_has_its_peak() -> None:
    model, x = mlp(), torch.randn(ROWS, 16)
    optimizer = torch.optim.Adam(model.parameters())
    with track(model) as seen:
        for _ in range(2):
            torch.zeros(3)
            one_step(model, x, optimizer)
    record = seen.record()
    order = [phase for i, (_, _, phase) in enumerate(record.timeline) if i == 0 or phase != record.timeline[i - 1][2]]
    assert order == ["between", *["forward", "backward", "optimizer", "between"] * 2]
    assert max(record.phases.values()) == record.peak == record.phases[record.at.phase]
    assert list(record.phases) == ["between", "forward", "backward", "optimizer"]
    assert record.allocator is None
    weights = sum(p.nbytes for p in model.parameters())
    assert record.phases["optimizer"] >= 4 * weights  # weights, gradients, two moments


def test_the_loss_belongs_to_the_forward_pass_and_evaluation_does_not_stretch_it() -> None:
    model, x = mlp(), torch.randn(ROWS, 16)
    with track(model) as seen:
        with torch.no_grad():
            model(x)
        torch.zeros(10)
    assert seen.record().timeline[-1][2] == "between"
    with track(model) as seen:
        loss = (model(x) - 1).square().mean()
    assert seen.record().timeline[-1][2] == "forward"
    assert "" in saved(seen.record())  # the square keeps its input, outside of any module
    del loss


def test_a_backward_pass_inside_an_update_and_an_update_inside_a_backward_pass() -> None:
    model, x = mlp(), torch.randn(ROWS, 16)
    inside = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        inside.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with track(model) as seen:
        inside.step(closure)
    assert {"forward", "backward", "optimizer"} <= set(seen.record().phases)
    learners = {p: torch.optim.Adam([p]) for p in model.parameters()}
    for parameter, learner in learners.items():
        parameter.register_post_accumulate_grad_hook(lambda _, learner=learner: learner.step())
    with track(model) as seen:
        model(x).sum().backward()
    order = [phase for _, _, phase in seen.record().timeline]
    assert "optimizer" in order[order.index("backward") :]
    assert "backward" in order[order.index("optimizer") :]


def test_the_peak_in_a_backward_pass_names_the_module_that_is_undone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh())
    with track(model) as seen:
        model(torch.randn(2000, 4)).sum().backward()  # beside both results there is a gradient now
    at = seen.record().at
    assert (at.phase, at.module) == ("backward", "2")
    assert at.line is not None
    assert "backward()" in at.line
    assert str(seen.record()).startswith("peak ")
    assert "in backward of 2" in str(seen.record())


def test_a_transformer_with_tied_weights() -> None:
    record = transformer_record()
    for number in range(3):
        assert saved(record)[f"blocks.{number}.norm"] == 4 * 24 * (16 + 2) * 4  # its result (for `mix`) comes later
    assert Track.from_json(json.loads(json.dumps(record.to_json()))) == record
    names = [module.name for module in record.modules]
    assert len(names) == len(set(names))
    assert "(Transformer)" in names


def test_checkpointing_keeps_less() -> None:
    plain, again = transformer_record(), transformer_record(again=True)
    assert again.kept["activations"] < 0.7 * plain.kept["activations"]


def test_training_is_the_same_to_the_bit_and_nothing_remains() -> None:
    def trained(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        before = set(vars(model[0]))
        for _ in range(3):
            x = torch.randn(ROWS, 16)
            if watched:
                with track(model):
                    one_step(model, x, optimizer)
            else:
                one_step(model, x, optimizer)
        assert set(vars(model[0])) == before
        return [*model.state_dict().values()]

    assert all(map(torch.equal, trained(watched=True), trained(watched=False)))
    _assert_no_hooks()


def _assert_no_hooks() -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
    assert _get_current_dispatch_mode() is None
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        torch.ones(2, requires_grad=True).square()
    assert packed


def test_an_error_inside_leaves_no_hook_and_what_was_seen() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    model = nn.Sequential(nn.Linear(16, 4), Broken())
    with pytest.raises(ValueError, match="broken"), track(model) as seen:
        model(torch.randn(ROWS, 16))
    _assert_no_hooks()
    record = seen.record()
    assert record.peak > 0
    assert "0" in {module.name for module in record.modules}


def test_a_module_that_failed_does_not_stay_open() -> None:
    model, x = mlp(), torch.randn(ROWS, 16)
    with track(model) as seen:
        with pytest.raises(RuntimeError):
            model(torch.randn(ROWS, 3))
        with torch.no_grad():
            model(x)
        torch.zeros(5)
    assert seen.record().timeline[-1][2] == "between"


def test_tensors_of_other_devices_do_not_count() -> None:
    model = nn.Linear(4, 4)
    with track(model) as seen:
        before = seen.record().peak
        torch.zeros(10**9, device="meta")
    assert seen.record().peak == before


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(BadArgument, match="str"), track("model"):  # type: ignore[arg-type]
        pass


@given(st.lists(st.integers(0, 10**6), max_size=400), st.integers(4, 100))
def test_thinning_keeps_the_ends_the_order_and_the_peak(values: list[int], limit: int) -> None:
    points = [(float(i), value, "forward") for i, value in enumerate(values)]
    few = thinned(points, limit)
    assert len(few) <= max(limit, 2)
    assert few == sorted(few)
    assert set(few) <= set(points)
    if points:
        assert few[0] == points[0]
        assert few[-1] == points[-1]
        assert max(value for _, value, _ in few) == max(values)


def test_a_long_run_still_gives_a_short_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.memory.tracking.MOST_POINTS", 5000)
    model = nn.Linear(2, 2)
    with track(model) as seen:
        for _ in range(6000):
            torch.zeros(100)
    record = seen.record()
    assert len(record.timeline) <= POINTS
    assert max(live for _, live, _ in record.timeline) == record.peak


@pytest.mark.gpu
def test_a_gpu_shows_the_same_modules_and_the_figures_of_its_allocator() -> None:
    torch.manual_seed(0)
    model = Transformer(words=500, width=64).cuda()
    ids = torch.randint(500, (16, 64), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated()  # captures of other tests among them, which no tensor shows
    with track(model) as seen:
        step()
    record = seen.record()
    assert record.device.startswith("cuda:")
    assert record.allocator is not None
    assert {"forward", "backward", "optimizer"} <= set(record.allocator)
    for phase in ("forward", "backward"):
        assert record.allocator[phase] >= record.phases[phase] * 0.95  # blocks are larger than tensors
    assert record.at.phase in ("forward", "backward")
    assert saved(record)["blocks.0.norm"] >= 16 * 64 * 64 * 4
    # workspaces of cuBLAS and attention
    assert max(record.allocator.values()) <= others + 4 * record.peak + 2**28


@pytest.mark.gpu
def test_the_backward_pass_of_a_gpu_runs_in_a_thread_of_its_own_and_its_modules_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh()).cuda()
    x = torch.randn(2**18, 4, device="cuda")
    with track(model) as seen:
        model(x).sum().backward()
    record = seen.record()
    assert (record.at.phase, record.at.module) == ("backward", "2")
    assert saved(record) == {"1": x.nbytes, "2": x.nbytes}


def test_a_step_that_fails_leaves_no_activations_behind() -> None:
    model, x = mlp(), torch.randn(ROWS, 16)

    def fail() -> None:
        with track(model):
            model(x)
            raise RuntimeError("in the middle of a step")

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    before = alive()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="in the middle"):
            fail()
    assert alive() <= before
