"""Random numbers of the host that decide nothing: they are told from those that do, and a replay repeats them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import PlanWarning
from hotloop.step.draws import repeat
from hotloop.step.inspection import Comparison, Inspection, host_noted, inspected, objection

from ..thorough import tries

CPU = torch.device("cpu")
X = torch.ones(6, 6)


class Dropped(nn.Module):
    """Layers that are dropped at a rate, as in BART and Whisper."""

    def __init__(self, rate: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rate = rate
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                chance = torch.rand([])
                if chance < self.rate:
                    continue
            x = torch.tanh(layer(x))
        return x


def seen_of(*passes: Callable[[], object], watch: Any = inspected) -> list[Inspection]:
    seen = [Inspection() for _ in passes]
    for inspection, call in zip(seen, passes, strict=True):
        with watch(CPU, inspection):
            call()
    return seen


@pytest.mark.parametrize("watch", [inspected, host_noted], ids=["inspected", "noted"])
def test_layers_that_are_never_dropped_do_the_same_work_each_time(watch: Any) -> None:
    model, x = Dropped(), torch.randn(16, 8)
    first, second = seen_of(lambda: model(x), lambda: model(x), watch=watch)
    assert not first.drew
    assert first.draws.made == [((), torch.float32)] * 3
    assert objection(first, second) is None
    assert "draws random numbers" in str(objection(first, second, repeats_draws=False))


@pytest.mark.parametrize(
    "use",
    [
        lambda r: r < 0.1,
        lambda r: r <= 0.0,  # it may be 0
        lambda r: r > 0.0,
        lambda r: r < torch.tensor(0.0),  # which may change
        lambda r: r.item(),
        lambda r: X * r,
        lambda r: r.clone(),
        lambda r: (r + 0.5) < 0.0,
        lambda r: torch.stack([X[0, 0], r]),
        lambda r: torch.where(r < X, X, 0.0),
    ],
)
def test_a_number_that_may_decide_something_counts(use: Callable[[Tensor], object]) -> None:
    assert seen_of(lambda: use(torch.rand([])))[0].drew


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(17),  # data
        lambda: torch.randn([]),
        lambda: torch.rand([], generator=torch.default_generator),
        lambda: torch.randint(3, ()),
        random.random,
        np.random.rand,
        lambda: torch.ones(3).uniform_(),
    ],
)
def test_other_draws_count_even_beside_such_ones(draw: Callable[[], object]) -> None:
    assert seen_of(lambda: (torch.rand([]) < 0.0, draw()))[0].drew


@settings(deadline=None, max_examples=tries(25, 60))
@given(
    limit=st.floats(-2, 2),
    how=st.sampled_from([Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge]),
    numbers=st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1),
)
def test_a_comparison_is_taken_as_decided_only_where_no_number_changes_it(
    limit: float, how: Callable[..., Tensor], numbers: list[float]
) -> None:
    (seen,) = seen_of(lambda: bool(how(torch.rand([]), limit)))
    if not seen.drew:
        ends = [*numbers, 0.0, 1 - 2**-24]
        assert len({bool(how(torch.tensor(number), limit)) for number in ends}) == 1


def test_the_same_numbers_of_draws_are_asked_for() -> None:
    few, many = Dropped(layers=2), Dropped(layers=3)
    assert objection(*seen_of(lambda: few(torch.randn(16, 8)), lambda: many(torch.randn(16, 8)))) is not None


@pytest.mark.parametrize(("name", "rate"), [("Bart", 0.0), ("Whisper", 0.0), ("M2M100", 0.05)])
def test_the_models_of_transformers(name: str, rate: float) -> None:
    import transformers  # takes seconds, and each worker collects this file

    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 8)
    drops = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)  # on a CPU drawn on the host
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = getattr(transformers, f"{name}Config")(vocab_size=40, **sizes, **drops, **tokens)
    assert config.encoder_layerdrop == config.decoder_layerdrop == rate, "unless somebody says otherwise"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).train()
    words = torch.randint(3, 40, (2, 20))
    inputs = {"input_features": torch.randn(2, 80, 3000)} if name == "Whisper" else {"input_ids": words}
    seen = seen_of(*[lambda: model(**inputs, labels=words).loss] * 2)
    assert len(seen[0].draws.made) in ({4} if rate else {4, 0})  # none for a rate of 0 from transformers 5.23 on
    assert (objection(*seen) is None) == (rate == 0.0)


def test_a_repetition_leaves_the_generator_where_the_draws_did() -> None:
    torch.manual_seed(3)
    (seen,) = seen_of(lambda: Dropped()(torch.randn(16, 8)))
    draws = seen.draws.made
    torch.manual_seed(3)
    for _ in range(4):
        torch.rand([]), torch.rand([]), torch.rand([])
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    repeat(draws, 4)
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_later_pass_in_which_a_number_decides_is_another() -> None:
    model, x = Dropped(), torch.randn(16, 8)
    (seen,) = seen_of(lambda: model(x))
    for rate, differs in ((0.0, False), (0.3, True)):
        model.rate = rate
        with (comparison := Comparison(seen)):
            model(x)
        assert (comparison.departure() is not None) == differs


def data(batches: int) -> DataLoader[Any]:
    x = torch.randn(16 * batches, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.flip(1)), 16, shuffle=True)  # whose order is drawn on the host


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [1, 8])
def test_on_a_gpu_such_a_step_is_captured_and_epochs_are_shuffled_as_without(graph: int) -> None:
    def run(graph: int) -> tuple[Tensor, Tensor]:
        model = Dropped()
        plan = hotloop.Plan("cuda", graph=graph, stream="resident", fused=True)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.MSELoss(), device="cuda", plan=plan)
        torch.manual_seed(7)
        loop.fit(data(24), epochs=4, progress=False, monitor=False)
        assert loop.plan.graph == graph
        return model.layers[0].weight.detach().clone(), torch.get_rng_state()

    (weight, state), (expected, after) = run(graph), run(0)
    assert torch.equal(state, after)
    assert torch.equal(weight, expected)


@pytest.mark.gpu
def test_on_a_gpu_layers_that_are_dropped_are_not_captured() -> None:
    model = Dropped(0.3)
    plan = hotloop.Plan("cuda", graph=1, stream="resident")
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.MSELoss(), device="cuda", plan=plan)
    with pytest.warns(PlanWarning, match="draws random numbers on the host"):
        loop.fit(data(12), epochs=1, progress=False, monitor=False)
    assert loop.plan.graph == 0
