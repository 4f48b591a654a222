"""Compiled objectives and blocks: what is compiled how often, and how long that is expected to take."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop._torch import inductor
from hotloop.errors import PlanWarning
from hotloop.levers.applied import AppliedPlan
from hotloop.levers.compile import expected_seconds, form_of, key_of, remember_seconds, varying_between
from hotloop.objective.objectives import as_objective
from hotloop.plan import Plan
from hotloop.step import compilation
from hotloop.step.compilation import CompiledObjective

COMPILED, BLOCKS = Plan("cpu", compile="default"), Plan("cpu", compile="blocks")
CRITERION = as_objective(nn.CrossEntropyLoss(), None)
pytestmark = pytest.mark.usefixtures("no_kernels")


def batch_of(items: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(items, 6, generator=generator), torch.arange(items) % 3


def graphs() -> int:
    """How many were compiled so far."""
    return inductor(None).graphs


def test_what_varies_more_often_than_it_is_compiled_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "MOST_COMPILATIONS", 0)
    model, batch, before = nn.Linear(6, 3), batch_of(), graphs()
    compiled = CompiledObjective(CRITERION, "default")

    with pytest.warns(PlanWarning, match="runs eagerly from here on"):
        compiled(model, batch)
    assert compiled.obstacle is not None
    assert torch.equal(compiled(model, batch), CRITERION(model, batch))
    assert graphs() == before + 1


def test_one_compilation_for_all_lengths() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [(torch.randn(3, length, 4), torch.randn(3, length, 1)) for length in (20, 33, 47)]
    varying = varying_between(batches[0], batches[1])
    assert varying == {(0, 1), (1, 1)}
    objective = as_objective(nn.MSELoss(), None)
    in_calls = CompiledObjective(objective, "default", varying)

    before = graphs()

    for batch in batches:
        loss = in_calls(model, batch)
        torch.testing.assert_close(loss, objective(model, batch))
        loss.backward()
    assert graphs() == before + 1
    shorter = batches[0][0][:2], batches[0][1][:2]  # in a dimension that was not said
    in_calls(model, shorter)
    assert graphs() == before + 1


def test_lengths_that_turn_out_to_vary_take_one_more_compilation() -> None:
    torch.compiler.reset()  # what other tests have compiled would be found
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    objective = as_objective(nn.MSELoss(), None)
    compiled = CompiledObjective(objective, "default")
    counts, before = [], graphs()
    for items, length in ((3, 20), (2, 20), (3, 33), (3, 20), (3, 47), (2, 47), (3, 50)):
        given = torch.randn(items, length, 5), torch.randn(items, length, 1)
        loss = compiled(model, given)
        torch.testing.assert_close(loss, objective(model, given))
        loss.backward()
        counts.append(graphs() - before)
    assert counts == [1, 1, 2, 2, 2, 2, 2], "smaller batches, as at the end of an epoch, run eagerly"
    assert compiled.obstacle is None


class Attention(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, mask)), k


class Block(nn.Module):
    """A block as Hugging Face writes them: keyword arguments, a tuple of tensors in and out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(number), nn.LayerNorm(8)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, position: tuple[Tensor, Tensor] | None = None, **_: Any
    ) -> tuple[Tensor, ...]:
        x = x if position is None else x * position[0] + position[1]
        out, keys = self.attention(self.norm(x), attention_mask)
        return x + out, keys


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(number) for number in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        position = torch.ones(ids.size(1), 1), torch.zeros(ids.size(1), 1)
        for block in self.blocks:
            x, _ = block(x, attention_mask=None, position=position, past=None)
        return self.head(x).flatten(0, 1)


def words(length: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(2 * length).reshape(2, length) % 16
    return ids, ids.flatten()


def gradients(model: nn.Module, batch: Any) -> list[Tensor]:
    model.zero_grad()
    CRITERION(model, batch).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo hides, if no filter makes it an error
def test_blocks_are_compiled_once_for_all_of_them() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Net()
    names, attributes = list(model.state_dict()), list(vars(model.blocks[0]))
    expected, before = gradients(model, words(6)), graphs()
    applied = AppliedPlan(BLOCKS, model, [])
    applied.apply()
    for _ in range(2):
        torch.testing.assert_close(gradients(model, words(6)), expected)
    assert graphs() == before + 1

    model.eval()
    model(words(7)[0])
    model.train()
    with torch.no_grad():
        model(words(7)[0])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        torch.testing.assert_close(gradients(other, words(6)), expected)
        assert other.blocks[1].forward.__self__ is other.blocks[1]
        assert list(other.state_dict()) == names
    assert graphs() == before + 1, "an evaluation and copies are eager"
    applied.revert()
    assert list(vars(model.blocks[0])) == attributes


@pytest.mark.parametrize(
    ("first", "second", "varying"),
    [
        ([torch.zeros(2, 3), torch.zeros(4)], [torch.zeros(2, 5), torch.zeros(4)], {(0, 1)}),
        ({"a": torch.zeros(2, 3), "b": 1}, {"a": torch.zeros(4, 5), "b": 1}, {(0, 0), (0, 1)}),
        ([torch.zeros(2)], [torch.zeros(2)], set()),
        ([torch.zeros(2), 1], [torch.zeros(3), 2], None),
        ([torch.zeros(2)], [torch.zeros(2, 2)], None),
        ([torch.zeros(2)], [torch.zeros(3, dtype=torch.long)], None),
        ([torch.zeros(2)], [torch.zeros(3), torch.zeros(3)], None),
    ],
)
def test_what_varies_between_batches(first: Any, second: Any, varying: set[tuple[int, int]] | None) -> None:
    assert varying_between(first, second) == varying
    if varying is not None:
        assert form_of(first, frozenset(varying)) == form_of(second, frozenset(varying))


def test_a_compilation_that_was_made_before_is_expected_to_be_short(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    key = key_of(model, words(6), COMPILED)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "made").touch()
    remember_seconds(key, 20.0)
    assert expected_seconds(model, "default", key).seconds == pytest.approx(7.0)
    assert "cached" in expected_seconds(model, "default", key).evidence
    remember_seconds(key, 4.0)
    assert expected_seconds(model, "default", key).seconds == 4.0
    (tmp_path / "made").unlink()
    assert expected_seconds(model, "default", key).seconds > 10
