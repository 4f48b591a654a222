"""Compilation ahead: it runs nothing, the training beside it notices nothing, and its first call finds all compiled."""

import copy
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hotloop._torch import HERE
from hotloop.errors import PlanWarning
from hotloop.levers import repeated_blocks
from hotloop.levers.applied import AppliedPlan
from hotloop.levers.compile import BlockCode, form_of, varying_between
from hotloop.objective.objectives import Objective, as_objective
from hotloop.plan import Plan
from hotloop.step import compilation
from hotloop.step.compilation import (
    Compilation,
    CompilationOutcome,
    CompiledObjective,
    expected_seconds,
    form_for,
    key_of,
)
from hotloop.step.objectives import TrainedObjective

from ..warm import Warm

COMPILED, BLOCKS = Plan("cpu", compile="default"), Plan("cpu", compile="blocks")
CRITERION = as_objective(nn.CrossEntropyLoss(), None)
pytestmark = pytest.mark.usefixtures("no_kernels")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def batch_of(items: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(items, 6, generator=generator), torch.arange(items) % 3


def trained(objective: Objective, model: nn.Module) -> list[TrainedObjective]:
    return [TrainedObjective("loss", objective, (torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),))]


def outcome_of(running: Compilation, beside: Callable[[], object] = lambda: time.sleep(0.02)) -> CompilationOutcome:
    until = time.monotonic() + 110
    while (outcome := running.poll()) is None:
        assert time.monotonic() < until, "the compilation does not end"
        beside()
    return outcome


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    HERE.compiled = HERE.missed = 0
    switch = sys.getswitchinterval()
    yield
    assert sys.getswitchinterval() == switch


class Run:
    """A training that draws from all generators, and keeps what it drew."""

    def __init__(self) -> None:
        self.model, self.batch = network(), batch_of()
        self.last: Tensor | None = None
        self.trained = trained(self.objective, self.model)
        self.steps, self.drawn = 0, list[float]()
        random.seed(1)
        np.random.seed(1)  # the generator that people seed
        torch.manual_seed(1)

    def objective(self, model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        self.last = loss.detach()
        return loss

    def step(self) -> None:
        self.drawn += [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: S311
        optimizer = self.trained[0].optimizers[0]
        optimizer.zero_grad()
        CRITERION(self.model, (self.batch[0] + torch.randn(8, 6), self.batch[1])).backward()
        optimizer.step()
        self.steps += 1


def test_a_training_beside_a_compilation_is_the_same_training() -> None:
    """Weights, buffers and random numbers to the bit; nothing ran, and the first compiled step compiles nothing."""
    run, other = Run(), torch.compile(lambda x: x + 1, backend="eager")
    other(torch.zeros(2))  # a function of the person's, compiled before

    def beside() -> None:
        run.step()
        assert other(torch.zeros(2)).sum() == 2
        time.sleep(0.02 if run.steps > 100 else 0)  # the compilation has the machine

    running = Compilation(run.trained, run.model, run.batch, COMPILED)
    outcome = outcome_of(running, beside)

    assert outcome.why is None
    assert outcome.graphs == 1
    assert 0 < outcome.busy <= outcome.seconds == running.seconds
    assert run.last is None, "the person's code has had an effect"
    alone = Run()
    while alone.steps < run.steps:
        alone.step()
    assert run.drawn == alone.drawn
    for (name, value), expected in zip(run.model.state_dict().items(), alone.model.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name

    compiled = outcome.ready["loss"]
    loss = compiled(run.model, run.batch)
    loss.backward()
    compiled(run.model, run.batch).backward()
    assert (HERE.compiled, HERE.missed) == (0, 0)
    assert run.last is not None
    assert loss.isfinite()
    compiled(run.model, batch_of(5))  # another form is eager
    assert (HERE.compiled, HERE.missed) == (0, 0)
    assert compiled.obstacle is None


@pytest.mark.gpu
@pytest.mark.xfail(  # it passes by itself
    strict=False, reason="after other tests in one process numbers differ; nothing is compiled beside a GPU's training"
)
def test_on_a_gpu_a_training_beside_a_compilation_is_the_same_training() -> None:
    """Also where it restores states of the GPU's generator, and captures CUDA graphs."""

    def train(steps: int | None) -> tuple[nn.Module, int, CompilationOutcome | None, Any]:
        model = network().cuda()
        batch = tuple(each.cuda() for each in batch_of())
        objectives = trained(CRITERION, model)
        torch.cuda.manual_seed(1)
        running = Compilation(objectives, model, batch, plan) if steps is None else None
        done = 0
        while running.poll() is None if running is not None else done < (steps or 0):
            state = torch.cuda.get_rng_state()
            first = torch.rand(3, device="cuda")
            torch.cuda.set_rng_state(state)
            assert torch.equal(first, torch.rand(3, device="cuda"))
            loss = CRITERION(model, batch)
            loss.backward()
            objectives[0].optimizers[0].step()
            objectives[0].zero_grad()
            if done % 100 == 50:
                graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    y = x * 2
                graph.replay()
                assert y.sum().item() == 8
            done += 1
        return model, done, running and running.poll(), batch

    plan = Plan("cuda", compile="default", precision="bf16")
    torch.cuda.graph(torch.cuda.CUDAGraph())  # its stream
    model, steps, outcome, batch = train(None)
    alone, *_ = train(steps)
    for (name, value), expected in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    assert outcome is not None
    assert outcome.why is None
    with torch.autocast("cuda", torch.bfloat16):
        loss = outcome.ready["loss"](model, batch)
    loss.backward()
    assert (HERE.compiled, HERE.missed) == (0, 0)
    assert loss.isfinite()


def test_a_graph_that_breaks_is_not_adopted() -> None:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        torch._dynamo.graph_break()
        return out.sum()

    line = objective.__code__.co_firstlineno + 2
    model = network()
    outcome = outcome_of(Compilation(trained(objective, model), model, batch_of(), COMPILED))

    assert not outcome.ready
    assert not outcome.is_ready
    assert "the compiler breaks the graph at" in str(outcome.why)
    assert f"test_compilation.py:{line}" in str(outcome.why)


def test_an_error_is_the_outcome() -> None:
    model = network()
    wrong = torch.zeros(8, 7), torch.zeros(8, dtype=torch.long)
    outcome = outcome_of(Compilation(trained(CRITERION, model), model, wrong, COMPILED))

    assert "the compiler failed" in str(outcome.why)
    assert "\n" not in str(outcome.why)
    assert not outcome.ready


class Thing:
    """What a collate function may put into a batch."""


def test_a_batch_that_cannot_be_compared() -> None:
    model = network()
    outcome = outcome_of(Compilation(trained(CRITERION, model), model, [Thing(), *batch_of()], COMPILED))

    assert "cannot be compared" in str(outcome.why)


def test_a_mode_that_intercepts_functions() -> None:
    model = network()
    with torch.device("cpu"):
        outcome = Compilation(trained(CRITERION, model), model, batch_of(), COMPILED).poll()

    assert outcome is not None
    assert "intercepts" in str(outcome.why)


def test_what_times_kernels_is_not_compiled_ahead() -> None:
    model = network()
    outcome = Compilation(trained(CRITERION, model), model, batch_of(), Plan("cpu", compile="max-autotune")).poll()

    assert outcome is not None
    assert "runs kernels" in str(outcome.why)


def test_an_evaluation_is_not_compiled_and_an_abandoned_compilation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    monkeypatch.setattr(compilation, "why_not_ahead", lambda: model.eval() and None)  # as the thread begins
    running = Compilation(trained(CRITERION, model), model, batch_of(), COMPILED)
    time.sleep(0.3)
    assert running.poll() is None
    running.abandon()

    outcome = outcome_of(running)
    assert outcome.why == "nobody waited for it"
    assert outcome.graphs == 0


ENDING = """
import sys, time, torch
from torch import nn
from hotloop.objective.objectives import as_objective
from hotloop.plan import Plan
from hotloop.step.compilation import Compilation
from hotloop.step.objectives import objectives_of
model = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.GELU(), nn.LayerNorm(7)) for _ in range(9)))
made = objectives_of(torch.optim.SGD(model.parameters()), as_objective(nn.MSELoss(), None))
running = Compilation(made, model, (torch.zeros(5, 7), torch.zeros(5, 7)), Plan("cpu", compile="default"))
time.sleep(1)
sys.exit(0 if running.poll() is None else 3)
"""


def test_the_process_can_end_while_a_compilation_runs(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    ended = warm.run(script, cwd=tmp_path, environment={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})

    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr


def test_what_was_not_compiled_ahead_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "MOST", 0)
    model = nn.Linear(6, 3)
    batch = batch_of()
    ready = CompiledObjective(CRITERION, "default", form=form_for(batch, frozenset()))

    with pytest.warns(PlanWarning, match="runs eagerly from here on"):
        loss = ready(model, batch)
    assert torch.equal(loss, CRITERION(model, batch))
    assert (HERE.compiled, HERE.missed) == (0, 1)
    assert ready.obstacle is not None
    assert torch.equal(ready(model, batch), loss)
    assert HERE.missed == 1


def test_one_compilation_for_all_lengths() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [(torch.randn(3, length, 4), torch.randn(3, length, 1)) for length in (20, 33, 47)]
    varying = varying_between(batches[0], batches[1])
    assert varying == {(0, 1), (1, 1)}
    objective = as_objective(nn.MSELoss(), None)
    in_calls = CompiledObjective(objective, "default", varying)

    for batch in batches:
        loss = in_calls(model, batch)
        torch.testing.assert_close(loss, objective(model, batch))
        loss.backward()
    assert HERE.compiled == 1
    shorter = batches[0][0][:2], batches[0][1][:2]  # in a dimension that was not said
    in_calls(model, shorter)
    assert HERE.compiled == 1

    ahead = outcome_of(Compilation(trained(objective, model), model, batches[0], COMPILED, others=batches[1:2]))
    assert ahead.why is None
    assert ahead.graphs == 0, "the calls have compiled it"
    for batch in (*batches, shorter):
        torch.testing.assert_close(ahead.ready["loss"](model, batch), objective(model, batch))
    assert (HERE.compiled, HERE.missed) == (1, 0)
    assert not any(hasattr(each, "_dynamo_weak_dynamic_indices") for each in batches[1])


def test_lengths_that_turn_out_to_vary_take_one_more_compilation() -> None:
    torch.compiler.reset()  # what other tests have compiled would be found
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    objective = as_objective(nn.MSELoss(), None)
    compiled = CompiledObjective(objective, "default")
    counts = []
    for items, length in ((3, 20), (2, 20), (3, 33), (3, 20), (3, 47), (2, 47), (3, 50)):
        given = torch.randn(items, length, 5), torch.randn(items, length, 1)
        loss = compiled(model, given)
        torch.testing.assert_close(loss, objective(model, given))
        loss.backward()
        counts.append(HERE.compiled)
    assert counts == [1, 1, 2, 2, 2, 2, 2], "smaller batches, as at the end of an epoch, run eagerly"
    assert compiled.obstacle is None


def test_batches_that_differ_in_more_than_sizes() -> None:
    model, (inputs, targets) = network(), batch_of()
    other = inputs, targets.float()
    outcome = outcome_of(Compilation(trained(CRITERION, model), model, (inputs, targets), COMPILED, others=[other]))

    assert outcome.why == "batches differ in more than their sizes"


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


def test_blocks_are_compiled_once_for_all_of_them_and_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net()
    names, attributes = list(model.state_dict()), list(vars(model.blocks[0]))
    running = Compilation(trained(CRITERION, model), model, words(6), BLOCKS, others=[words(11)])
    for length in (6, 6, 11):  # in the third step, a size differs
        assert running.poll() is None
        gradients(model, words(length))
    assert list(vars(model.blocks[0])) == attributes
    outcome = outcome_of(running)
    assert outcome.why is None
    assert outcome.graphs == 1

    code = BlockCode.of(Block)
    run, calls = code.run, list[int]()
    monkeypatch.setattr(code, "run", lambda *args, **kwargs: (calls.append(1), run(*args, **kwargs))[1])
    expected = {length: gradients(model, words(length)) for length in (6, 9, 14)}
    applied = AppliedPlan(BLOCKS, model, [])
    applied.apply()
    for length, eager in expected.items():
        torch.testing.assert_close(gradients(model, words(length)), eager)
    assert len(calls) == 12
    assert (HERE.compiled, HERE.missed) == (0, 0)

    model.eval()
    model(words(6)[0])
    model.train()
    with torch.no_grad():
        model(words(6)[0])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        torch.testing.assert_close(gradients(other, words(6)), expected[6])
        assert other.blocks[1].forward.__self__ is other.blocks[1]
        assert list(other.state_dict()) == names
    assert len(calls) == 12, "an evaluation and copies are eager"
    applied.revert()
    assert all("forward" not in vars(block) for block in model.blocks)


def test_a_model_without_blocks() -> None:
    model = nn.Linear(6, 3)
    outcome = outcome_of(Compilation(trained(CRITERION, model), model, batch_of(), BLOCKS))

    assert "repeats no block" in str(outcome.why)


def test_blocks_that_nobody_waits_for_are_left_as_they_were() -> None:
    model = Net()
    running = Compilation(trained(CRITERION, model), model, words(6), BLOCKS)
    assert all("forward" in vars(block) for block in model.blocks)
    running.abandon()
    assert all("forward" not in vars(block) for block in model.blocks)


def test_the_objective_of_compiled_blocks_is_eager() -> None:
    model, batch = network(), batch_of()
    model.eval()

    assert torch.equal(CompiledObjective(CRITERION, "blocks")(model, batch), CRITERION(model, batch))
    assert HERE.compiled == 0


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


def test_how_long_it_will_take(tmp_path: Any) -> None:
    model = Net()
    layers = len([m for m in model.modules() if not list(m.children())])
    key = key_of(model, words(6), COMPILED)

    cold = 15 + 0.35 * layers
    assert expected_seconds(model, "default").seconds == cold
    assert expected_seconds(model, "max-autotune").seconds == 8 * cold
    assert expected_seconds(model, "blocks").seconds == 15 + 0.35 * 3
    assert len(repeated_blocks(model)) == 4
    assert expected_seconds(model, "default", key).seconds == cold
    assert key != key_of(model, words(7), COMPILED)
    assert key != key_of(model, words(6), BLOCKS)


def test_a_compilation_that_was_made_before_is_expected_to_be_short(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    key = key_of(model, words(6), COMPILED)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "made").touch()
    compilation._remember(key, 20.0)
    assert expected_seconds(model, "default", key).seconds == pytest.approx(7.0)
    assert "cached" in expected_seconds(model, "default", key).evidence
    compilation._remember(key, 4.0)
    assert expected_seconds(model, "default", key).seconds == 4.0
    (tmp_path / "made").unlink()
    assert expected_seconds(model, "default", key).seconds > 10
