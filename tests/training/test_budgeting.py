"""A budget of memory on real steps: it is kept by measured bytes, with the least time, and training is the same."""

import copy
import gc
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.errors import BadArgument
from hotloop.memory.budget import CheckpointCandidate
from hotloop.memory.storages import live_tensors
from hotloop.memory.tracking import track
from hotloop.plan import Plan
from hotloop.training.budgeting import Budgeting, Look, budgeted, candidates
from hotloop.tune.rehearsal import in_use

from ..thorough import some

pytestmark = pytest.mark.usefixtures("light_heap")


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.all(x).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attend = Attention(width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        return x + self.think(self.second(x))


class Net(nn.Module):
    def __init__(self, layers: int = 4, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList([Layer(width, dropout) for _ in range(layers)])
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def objective(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def texts(items: int = 16, length: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(items * (length + 1)).reshape(items, -1) * 7 % 32
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loop_of(device: str = "cpu", **plan: Any) -> hotloop.Loop:
    torch.manual_seed(0)
    model = Net()
    chosen = Plan(device, stream="direct", **plan)
    return hotloop.Loop(model, torch.optim.AdamW(model.parameters()), objective=objective, device=device, plan=chosen)


def peak_of(loop: hotloop.Loop) -> int:
    """The live bytes of real steps of a loop, measured by something else than what chose."""
    with track(loop.model) as seen:
        for _ in range(2):
            loop.step(texts())
    return seen.record().peak


def everything(loop: hotloop.Loop) -> list[Any]:
    model, optimizer = loop.model, loop._core.optimizers[0]
    return [
        [value.clone() for value in model.state_dict().values()],
        [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()],
        [value for state in copy.deepcopy(optimizer.state_dict()["state"]).values() for value in state.values()],
        [torch.get_rng_state()],
        [torch.tensor([module.training for module in model.modules()])],
        [torch.tensor([len(vars(module)) for module in model.modules()])],
    ]


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert [len(part) for part in a] == [len(part) for part in b]
    assert all(torch.equal(x, y) for these, those in zip(a, b, strict=True) for x, y in zip(these, those, strict=True))


@pytest.fixture(scope="module")
def own_peak() -> int:
    """What a plain step takes beyond what is there before it."""
    loop = loop_of()
    before = in_use(torch.device("cpu"))
    return (
        budgeted(loop._core.subject, replace(loop.plan, memory_budget="1TiB"), texts())[1].peak_before or 0
    ) - before


def with_room_for(share: float, own_peak: int) -> int:
    """A budget of a share of a plain step, beside all that lives now, tensors of other tests too."""
    return in_use(torch.device("cpu")) + int(share * own_peak)


Chosen = tuple[int, Plan, Budgeting]


def chosen_for(share: float, own_peak: int) -> Chosen:
    """A budget, and what was chosen for it."""
    loop = loop_of()
    before = everything(loop)
    budget = with_room_for(share, own_peak)
    plan, found = budgeted(loop._core.subject, replace(loop.plan, memory_budget=budget), texts())
    assert_same(before, everything(loop))
    return budget, plan, found


@pytest.fixture(scope="module")
def tight(own_peak: int) -> Chosen:
    return chosen_for(0.65, own_peak)


@pytest.mark.parametrize("share", some([0.9, 0.65], [0.65]))
def test_the_budget_is_kept_by_measured_bytes(share: float, own_peak: int, tight: Chosen) -> None:
    budget, plan, found = tight if share == 0.65 else chosen_for(share, own_peak)
    assert plan.recompute == found.recompute != ()
    assert not plan.checkpointing
    assert found.missing == 0
    assert found.peak_after is not None
    saved = [row.saved for row in found.rows if row.name in found.recompute]
    assert budget - 2 * max(saved) < found.peak_after <= budget, "little is computed again that need not be"
    for recompute in (plan.recompute, ()):
        again = loop_of(recompute=recompute)
        budget = with_room_for(share, own_peak)
        assert (peak_of(again) <= budget) == bool(recompute)


def test_the_choice_is_the_quickest_of_those_that_save_as_much(tight: Chosen) -> None:
    _, _, found = tight
    chosen = [row for row in found.rows if row.name in found.recompute]
    taken, saved = sum(row.seconds for row in chosen), sum(row.saved for row in chosen)
    rows = [row for row in found.rows if row.saved <= max(block.saved for block in chosen)]
    for number in range(len(rows) + 1):
        for several in combinations(rows, number):
            names = [row.name for row in several]
            if any(a.startswith(f"{b}.") for a in names for b in names):
                continue
            if sum(row.saved for row in several) >= saved:
                assert sum(row.seconds for row in several) >= taken * (1 - 1e-9)


def test_a_block_and_its_parts_are_offered_and_never_both(tight: Chosen) -> None:
    _, _, found = tight
    offered = {row.name for row in found.rows}
    assert {"layers.0", "layers.0.attend", "layers.0.think"} <= offered
    assert "layers.0.first" not in offered  # what it gives is kept by those who take it
    assert not any(a.startswith(f"{b}.") for a in found.recompute for b in found.recompute)


@pytest.mark.parametrize("recompute", [("layers.0", "layers.2.think"), ("layers.1.attend", "layers.3")])
def test_training_is_the_same_to_the_bit(recompute: tuple[str, ...]) -> None:
    def trained(**plan: Any) -> list[Tensor]:
        loop = loop_of(**plan)
        torch.manual_seed(1)
        losses = [loop.step(texts()) for _ in range(3)]
        return [*losses, *loop.model.state_dict().values(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(trained(recompute=recompute), trained(), strict=True))


def test_what_fits_is_left_alone() -> None:
    loop = loop_of()
    plan, found = budgeted(loop._core.subject, replace(loop.plan, memory_budget="1GiB", checkpointing=True), texts())
    assert (plan.recompute, plan.checkpointing, found.rows, found.tried) == ((), False, (), 1)
    assert found.peak_before == found.peak_after
    assert found.step_before == found.step_after


def test_an_impossible_budget_is_said_plainly() -> None:
    loop = loop_of()
    plan, found = budgeted(loop._core.subject, replace(loop.plan, memory_budget="1KB"), texts())
    assert found.missing is not None
    assert found.missing > 0
    assert found.peak_after is not None
    assert found.peak_before is not None
    assert found.peak_after < 0.7 * found.peak_before
    assert {f"layers.{i}" for i in range(4)} == {name[:8] for name in plan.recompute}
    assert "are missing, and all blocks are checkpointed" in str(found)
    assert "micro_batch" in str(found)


def test_a_model_without_blocks_is_said_plainly() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain")
    batch = (torch.randn(32, 4), torch.zeros(32, 1))
    plan, found = budgeted(loop._core.subject, replace(loop.plan, memory_budget=1000), batch)
    assert plan.recompute == ()
    assert "repeats no block" in str(found)


def test_fewer_items_at_once_need_less(own_peak: int) -> None:
    loop = loop_of()
    plan = replace(loop.plan, memory_budget=with_room_for(0.65, own_peak), micro_batch=4)
    _, found = budgeted(loop._core.subject, plan, texts())
    assert found.recompute == ()
    assert found.missing == 0


def test_a_step_that_does_not_fit_at_all_is_brought_into_its_budget(own_peak: int, memory_of: Any) -> None:
    loop = loop_of()
    before = everything(loop)
    budget = with_room_for(0.7, own_peak)
    with memory_of(int(0.8 * own_peak)):
        plan, found = budgeted(loop._core.subject, replace(loop.plan, memory_budget=budget), texts())
    assert found.peak_before is None
    assert found.missing == 0
    assert found.step_before is None
    assert "out of memory before" in str(found)
    assert_same(before, everything(loop))
    del loop, before
    again = loop_of(recompute=plan.recompute)
    budget = with_room_for(0.7, own_peak)
    assert peak_of(again) <= budget


def test_any_other_error_is_passed_on_and_leaves_no_trace() -> None:
    loop = loop_of()
    loop.step(texts())
    before = everything(loop)
    with pytest.raises(IndexError):
        budgeted(loop._core.subject, replace(loop.plan, memory_budget="1GiB"), (texts()[0] + 1000, texts()[1]))
    assert_same(before, everything(loop))


def test_a_look_that_fails_holds_nothing() -> None:
    """PyTorch cannot free a graph that hooks hold and whose backward pass never comes."""
    model = Net()
    steps: list[None] = []

    def step() -> None:
        steps.append(None)
        model(texts()[0])
        if len(steps) > 1:  # the first one runs before anything is hooked
            raise torch.OutOfMemoryError("no more")

    look = Look(model, torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError):
        look.blocks(step)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    gc.collect()
    assert not any(tensor.shape[:2] == (16, 16) and tensor.dim() == 3 for tensor in live_tensors())


def test_a_plan_without_a_budget_is_refused() -> None:
    loop = loop_of()
    with pytest.raises(BadArgument, match="no memory_budget"):
        budgeted(loop._core.subject, loop.plan, texts())
    with pytest.raises(BadArgument, match="memory_budget='lots'"):
        budgeted(loop._core.subject, replace(loop.plan, memory_budget="lots"), texts())


def test_the_candidates_are_blocks_and_their_parts() -> None:
    assert set(candidates(Net(layers=2))) == {
        f"layers.{i}{part}" for i in range(2) for part in ("", ".attend", ".think", ".first", ".second")
    }


def test_the_record_goes_to_json_and_back() -> None:
    found = Budgeting(
        100, 200, 99, 1.0, 1.2, ("a",), (CheckpointCandidate("a", 101, 0.1), CheckpointCandidate("b", 7, 0.2)), 3
    )
    assert Budgeting.from_json(found.to_json()) == found
    assert "1 block of 2 checkpointed" in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.85, 0.7])
def test_on_a_gpu_the_budget_is_kept_by_the_allocator(share: float) -> None:
    def build(**plan: Any) -> hotloop.Loop:
        torch.manual_seed(0)
        model = Net(layers=8, width=256)
        chosen = Plan("cuda", precision="bf16", stream="direct", **plan)
        optimizer = torch.optim.AdamW(model.parameters())
        return hotloop.Loop(model, optimizer, objective=objective, device="cuda", plan=chosen)

    batch = tuple(tensor.cuda() for tensor in texts(64, 256))

    def peak(**plan: Any) -> int:
        loop = build(**plan)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            loop.step(batch)
        return torch.cuda.max_memory_allocated()

    budget = int(share * peak())
    loop = build()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, at = everything(loop), torch.cuda.max_memory_allocated()
    plan, found = budgeted(loop._core.subject, replace(loop.plan, memory_budget=budget), batch)
    assert torch.cuda.max_memory_allocated() >= at
    assert_same(before, everything(loop))
    assert found.missing == 0
    assert found.peak_after is not None
    assert 0.9 * budget < found.peak_after <= budget
    del loop, before
    assert peak(recompute=plan.recompute) <= 1.01 * budget  # the loop keeps a few losses besides
