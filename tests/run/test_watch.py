"""`Watch`: a loss that is lost stops the run and names the step, the samples and what to do."""

import math
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop import Loop
from hotloop.errors import LossNotFinite
from hotloop.run.watch import MOST_POINTS, Watch

from ..thorough import tries

CPU = torch.device("cpu")


def poisoned(value: float = math.nan) -> TensorDataset:
    inputs = torch.ones(40, 3)
    inputs[17, 1] = value
    return TensorDataset(inputs, torch.ones(40, 2))


def loop_on(device: str, **options) -> Loop:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return Loop(model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), device=device, **options)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_step_the_samples_and_the_advice(value: float) -> None:
    loop = loop_on("cpu")
    with pytest.raises(LossNotFinite) as caught:
        loop.fit(DataLoader(poisoned(value), 8), progress=False)
    text = str(caught.value)
    assert "at step 3 (epoch 1, batch 2)" in text
    assert "samples of that batch: 16, 17, 18, 19, 20, 21, 22, 23" in text
    assert "hold NaN or infinity themselves: 17" in text
    assert "clean or drop those samples" in text


def test_an_empty_batch_is_named() -> None:
    with pytest.raises(LossNotFinite, match=r"the batch is empty(.|\n)*fix: leave out empty batches"):
        loop_on("cpu").fit([(torch.ones(0, 3), torch.ones(0, 2))], progress=False)


def test_on_a_cpu_the_weights_are_not_touched() -> None:
    loop = loop_on("cpu")
    batches = list(DataLoader(poisoned(), 8))
    for batch in batches[:2]:
        loop.step(batch)
    before = loop.model.weight.detach().clone()
    with pytest.raises(LossNotFinite, match="still those of the step before"):
        loop.step(batches[2])
    assert torch.equal(loop.model.weight, before)


def test_a_run_that_diverges_is_told_to_slow_down() -> None:
    model = nn.Linear(3, 2)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 1e6), nn.MSELoss(), device="cpu")
    with pytest.raises(LossNotFinite, match="lower the learning rate; clip the gradient"):
        loop.fit([(torch.ones(4, 3), torch.ones(4, 2))], epochs=200, progress=False)


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    watch = Watch(CPU, single=True)
    watch.begin_epoch()
    for i in range(5 * MOST_POINTS):
        watch.see({"loss": torch.tensor(float(i))}, 1)
    assert MOST_POINTS / 4 < len(watch.curve) <= MOST_POINTS
    batches = [batch for batch, _ in watch.curve]
    assert batches == sorted(set(batches))
    assert batches[-1] > 0.99 * 5 * MOST_POINTS
    assert all(loss == batch - 1 for batch, loss in watch.curve)


@pytest.mark.gpu
def test_on_a_gpu_the_same_is_found_a_little_later() -> None:
    loop = loop_on("cuda")
    with pytest.raises(LossNotFinite) as caught:
        loop.fit(DataLoader(poisoned(), 8), epochs=3, progress=False)
    text = str(caught.value)
    assert "at step 3 (epoch 1, batch 2)" in text
    assert "hold NaN or infinity themselves: 17" in text
    assert "the weights have diverged" in text


@pytest.mark.gpu
@pytest.mark.parametrize("batches", [3, 200, 700])
def test_on_a_gpu_losses_of_any_number_and_kind_are_added_up(no_waits, batches: int) -> None:
    watch = Watch(torch.device("cuda"), single=True)
    watch.begin_epoch()
    values = torch.arange(float(batches), device="cuda")
    counts = (torch.arange(batches, device="cuda") % 3 + 1).unbind()
    with no_waits():
        for number, (value, count) in enumerate(zip(values.unbind(), counts, strict=True)):
            parts = {"first": value, "second": value.bfloat16() * 0 + 2}
            watch.see(parts, count if number % 2 else number % 3 + 1)
        state = watch.state_dict()
    expected = sum(n * (n % 3 + 1) for n in range(batches)) / sum(n % 3 + 1 for n in range(batches))
    assert watch.means() == pytest.approx({"first": expected, "second": 2.0})
    resumed = Watch(torch.device("cuda"), single=True)
    resumed.load_state_dict(state)
    assert resumed.means() == pytest.approx({"first": expected, "second": 2.0})


@pytest.mark.gpu
def test_the_loss_is_read_without_waiting(no_waits) -> None:
    watch = Watch(torch.device("cuda"), single=True)
    watch.begin_epoch()
    value = torch.tensor(2.0, device="cuda")
    deadline = time.monotonic() + 5
    with no_waits():
        while watch.latest is None and time.monotonic() < deadline:
            watch.see({"loss": value}, 1)
    assert watch.latest == 2.0
    assert watch.means() == {"loss": 2.0}


def test_a_run_that_goes_on_after_the_last_batch_of_an_epoch_has_its_means() -> None:
    """As on an accelerator, where an epoch's last stretch may be saved before its end is."""
    before, after = (Watch(torch.device("meta"), single=True) for _ in range(2))
    before.device = after.device = CPU  # whose losses are added up there, as those of an accelerator are
    before.begin_epoch(1)
    for loss in (1.0, 3.0):
        before.see({"loss": torch.tensor(loss)}, 4)
    after.load_state_dict(before.state_dict())
    after.begin_epoch(1)
    after.load_state_dict(before.state_dict())
    assert after.end_epoch().means() == {"loss": 2.0}
    assert after.latest == before.latest
    assert after.curve == before.curve


def accelerated() -> Watch:
    """A watch that keeps losses where they are, as on an accelerator, on the CPU."""
    watch = Watch(torch.device("meta"), single=True)
    watch.device = CPU
    watch.begin_epoch(1)
    return watch


@pytest.mark.parametrize("make", [accelerated, lambda: Watch(CPU, single=True)], ids=["accelerator", "cpu"])
@given(batches=st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(1, 9)), min_size=1, max_size=80))
@settings(deadline=None, max_examples=tries(15, 40))
def test_a_loss_that_is_alone_is_seen_as_others_are(
    make: Callable[[], Watch], batches: list[tuple[float, int]]
) -> None:
    one, other = make(), make()
    for number, (loss, items) in enumerate(batches):
        one.see({"loss": torch.tensor(loss)}, items)
        other.see({"loss": torch.tensor(loss)}, torch.tensor(items))  # noted in the general way
        assert one.batches == other.batches == number + 1
        assert one.items_seen
    assert one.means() == pytest.approx(other.means(), rel=1e-6, abs=1e-6)
    assert one.items == other.items == sum(items for _, items in batches)
    assert one.state_dict()["names"] == ("loss",)


LOSSES = st.tuples(st.floats(-10, 10, width=32), st.floats(-10, 10, width=32))
STRETCHES = st.tuples(st.lists(LOSSES, min_size=1, max_size=5), st.integers(1, 9), st.booleans(), st.booleans())


@given(stretches=st.lists(STRETCHES, min_size=1, max_size=40), saved_after=st.integers(0, 40))
@settings(deadline=None, max_examples=tries(20, 60))
def test_means_are_the_same_however_losses_come_and_wherever_a_run_goes_on(
    stretches: list[tuple[list[tuple[float, float]], int, bool, bool]], saved_after: int
) -> None:
    """Alone or several at once, with items that the host knows or the device, read before or after a save."""
    watch, sums, items = accelerated(), [0.0, 0.0], 0
    for number, (losses, count, is_on_device, is_read) in enumerate(stretches):
        given = torch.tensor(count) if is_on_device else count
        if len(losses) == 1:
            watch.see(dict(zip("ab", torch.tensor(losses[0]), strict=True)), given)
        else:
            watch.see_stretch("ab", (torch.tensor(losses),), given, [None] * len(losses))
        if is_read:
            watch._losses.take_off()
        for row in losses:
            items += count
            sums = [total + loss * count for total, loss in zip(sums, row, strict=True)]
        if number == saved_after:
            state, watch = watch.state_dict(), accelerated()
            watch.load_state_dict(state)
    assert watch.items == items
    assert watch.means() == pytest.approx({"a": sums[0] / items, "b": sums[1] / items}, rel=1e-9, abs=1e-9)
    if saved_after != len(stretches) - 1:
        assert watch.latest == pytest.approx(sum(stretches[-1][0][-1]))


def test_an_epoch_has_its_own_losses_although_they_are_read_in_the_next_one() -> None:
    watch = accelerated()
    watch.see({"loss": torch.tensor(1.0)}, 2)
    first = watch.end_epoch()
    watch.begin_epoch(2)
    watch.see({"loss": torch.tensor(5.0)}, 2)
    assert watch.means() == {"loss": 5.0}
    assert first.means() == {"loss": 1.0}


@pytest.mark.parametrize("make", [accelerated, lambda: Watch(CPU, single=True)], ids=["accelerator", "cpu"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_alone_and_lost_names_its_step(make: Callable[[], Watch], value: float) -> None:
    watch = make()

    def run() -> None:
        for step in range(1, 41):
            watch.see({"loss": torch.tensor(value if step == 20 else 1.0)}, 4)
        watch.means()

    with pytest.raises(LossNotFinite, match="not finite at step 20 "):
        run()


def test_slow_steps_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the progress bar would show what was long ago."""
    now = 1000.0
    monkeypatch.setattr("hotloop.run.watch.time.monotonic", lambda: now)
    watch = accelerated()
    for step in range(100):
        now += 0.001
        watch.see({"loss": torch.tensor(float(step))}, 1)
    assert watch.items < 100, "of short steps, the last ones wait"
    seen = []
    for step in range(60):
        now += 2.0
        watch.see({"loss": torch.tensor(float(step))}, 1)
        seen.append(watch.latest)
    assert seen[-1] >= 57
