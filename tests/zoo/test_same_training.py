"""The zoo: with the plain plan, and tuned by itself, hotloop trains what was written, to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotloop import Loop

from ..thorough import THOROUGH, dealt, some, tries
from .trainings import ZOO, Endless, Halted, Killed, Parts, Training, by_hand, differences

EPOCHS, EVER = tries(2, 3), 10**6
STEPS = tries(13, 17)  # of runs that tune themselves: the tuner looks before the sixth
TUNED_AND_KILLED = (
    "cnn_with_batchnorm",
    "gan",
    "labels_popped_from_a_dict",
    "replay_queue",
    "module_with_a_torch_generator",
    "transform_with_a_generator",
    "optimizer_with_attributes",
)
ALSO = ("plain_mlp", "dropout", "deque_of_numbers")  # all that is in them, others have too
pytestmark = pytest.mark.usefixtures("light_heap")
members = pytest.mark.parametrize("training", ZOO, ids=lambda training: training.name)
# Of those that are tuned, one of three; those that are left out are killed or run out of memory.
MEMBERS = [each for n, each in enumerate(ZOO) if THOROUGH or n % 3 == 0 or each.name == "metric_in_the_objective"]


# By hand


@members
def test_the_plain_plan_is_the_loop_by_hand(training: Training) -> None:
    expected = training.build()
    by_hand(expected, epochs=EPOCHS)
    parts = training.build()
    parts.loop("plain").fit(parts.loader, epochs=EPOCHS, device_transform=parts.transform, progress=False)
    assert not differences(parts.everything(), expected.everything())


# Tuned


def fitted(training: Training, plan: str) -> tuple[Loop, Parts]:
    """A run that is expected to be long, ended early."""
    parts = training.build()
    halt = parts.halt(STEPS, Halted)
    loop = parts.loop(plan, halt)
    with pytest.raises(Halted):
        loop.fit(parts.loader, epochs=EVER, device_transform=parts.transform, progress=False, monitor=False)
    return loop, parts


def stepped(training: Training, plan: str) -> tuple[Loop, Parts]:
    """A loop of one's own over an epoch that is expected to be long."""
    parts = training.build()
    loop = parts.loop(plan)
    loader = Endless(parts.loader) if training.has_length else parts.loader
    for number, batch in enumerate(loop.batches(loader, device_transform=parts.transform), 1):
        loop.step(batch)
        if number == STEPS:
            break
    return loop, parts


@pytest.mark.usefixtures("nothing_rounds")
@pytest.mark.parametrize(
    ("training", "run"),
    [
        (training, fitted if training.only_fit else run)  # where its schedule counts epochs
        for training, run in dealt(MEMBERS, [fitted, stepped])
    ],
    ids=lambda each: getattr(each, "name", None) or each.__name__,
)
def test_tuning_is_not_felt(training: Training, run: Callable[..., tuple[Loop, Parts]]) -> None:
    _, expected = run(training, "plain")
    loop, parts = run(training, "auto")
    if training.has_length:
        assert loop.tuning is not None, "the tuner was to have its chance"
    if loop.plan.workers is not None:
        pytest.skip("it got more workers, whose random items come from other seeds, as the page of the lever says")
    assert not differences(parts.everything(), expected.everything())


@pytest.mark.usefixtures("nothing_rounds")
@pytest.mark.parametrize("name", some(TUNED_AND_KILLED + ALSO, TUNED_AND_KILLED))
def test_a_run_that_tunes_itself_and_is_killed(name: str, tmp_path: Path) -> None:
    training = next(each for each in ZOO if each.name == name)
    _, expected = fitted(training, "plain")
    for killed, error in ((9, Killed), (STEPS, Halted)):
        parts = training.build()
        loop = parts.loop("auto", parts.halt(killed, error))
        options: dict[str, Any] = {"device_transform": parts.transform, "progress": False, "monitor": False}
        with pytest.raises(error):
            loop.fit(parts.loader, epochs=EVER, save=tmp_path, every="2 steps", resume=error is Halted, **options)
        assert loop.tuning is not None
    assert not differences(parts.everything(), expected.everything())
