"""The zoo, out of memory: a repeated step is the one by hand in the same micro-batches, or somebody is told."""

import random
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._python_dispatch import TorchDispatchMode

import hotloop
from hotloop.errors import DoesNotFit

from ..thorough import THOROUGH, dealt, tries
from .trainings import ZOO, Parts, Training, by_hand, differences

LATE = tries(3, 8)  # the step from which on faults come when most of a pass has run
TRANSFORM, PASS, BACKWARD = range(1, 3), range(25), range(12, 25)  # operations of a step, roughly
pytestmark = pytest.mark.usefixtures("light_heap")


class Faults(TorchDispatchMode):
    """Memory that runs out at random operations of passes and transforms; not in optimizers or loaders."""

    def __init__(self, dice: random.Random, steps: Sequence[int], operations: range, only: str) -> None:
        super().__init__()
        self._dice, self._steps, self._operations, self._only = dice, set(steps), operations, only
        self._left: int | None = None  # operations until the next fault
        self.fired = 0

    def before(self, step: int) -> AbstractContextManager[Any]:
        """For the step: this mode where memory will run out, and nothing, which is faster, where it will not."""
        if step in self._steps:
            self._steps.remove(step)
            self._left = self._dice.choice(self._operations)
        return nullcontext() if self._left is None else self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left is not None and self._is_of_a_pass():
            self._left -= 1
            if self._left < 0:
                self.fired += 1
                self._left = None
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, says the test")
        return func(*args, **(kwargs or {}))

    def _is_of_a_pass(self) -> bool:
        """Whether the person's code is running, or the backward pass of it."""
        frame: Any = sys._getframe(2)
        inside = False
        while frame is not None:
            file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
            if "/torch/optim/" in file or "/torch/utils/data/" in file or name == "__iter__":
                return False
            if self._only:
                inside |= name == self._only and file.endswith("/trainings.py")
            else:
                inside |= file.endswith("/trainings.py") or "/torch/nn/" in file or "/torch/autograd/" in file
            frame = frame.f_back
        return inside


Survived = tuple[Parts, list[int | None], "Faults", list[str]]


def epochs_for(first: int) -> int:
    """Epochs of five batches: the last fault comes up to five steps after the first, and steps follow it."""
    return 2 if first + 5 < 9 else 3


def survived(training: Training, first: int, **settings: Any) -> Survived:
    """A run in which memory runs out twice: the sizes of its micro-batches by step, and what was said."""
    parts = without_plateau(training.build())
    settings |= {"accumulate": parts.accumulate, "clip_norm": parts.clip_norm}
    loop = parts.loop(hotloop.Plan("cpu", stream="direct", **settings))
    dice = random.Random(f"{training.name} {first}")  # noqa: S311
    steps = [first + dice.randrange(2), first + dice.randrange(3, 6)]
    operations = TRANSFORM if parts.transform is not None and first < LATE else PASS if first < LATE else BACKWARD
    faults = Faults(dice, steps, operations, training.only_forward)
    sizes: list[int | None] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(epochs_for(first)):
                batches = iter(loop.batches(parts.loader, device_transform=parts.transform))
                while True:
                    with faults.before(len(sizes)):
                        batch = next(batches, None)
                        if batch is None:
                            break
                        loop.step(batch)
                    sizes.append(loop.plan.micro_batch)
        except Exception as error:
            error.add_note("\n".join(str(warning.message) for warning in caught))
            raise
    assert loop.out_of_memory <= faults.fired  # a transform is repeated whole, and a look at the loss is given up
    return parts, sizes, faults, [str(warning.message) for warning in caught]


def accepted(training: Training, first: int) -> Survived:
    """The same where micro-batches are another training, which is told, and then accepted."""
    try:
        return survived(training, first)
    except DoesNotFit as refusal:
        if "is not that of its micro-batches" not in str(refusal):
            raise
    return survived(training, first, split="items")


def without_plateau(parts: Parts) -> Parts:
    """Without schedules that only `fit` asks."""
    parts.scheduler = [each for each in parts.scheduler if not isinstance(each, ReduceLROnPlateau)]
    return parts


ONLY_HERE = (  # what a step that is not repeated leaves alone: batches that change or are cut, and a refusal
    "loss_and_count",
    "two_objectives_that_accumulate",
    "input_normalised_in_place",
    "labels_popped_from_a_list",
    "batches_are_namedtuples",
    "objective_rescales_its_batch",
    "lstm_that_carries_its_state",
    "buffer_written_from_step_8",
    "transform_that_draws_from_the_global_one",
)
# One of three, and these; those that are left out are tuned or killed. What one of them imports takes seconds.
MEMBERS = [each for n, each in enumerate(ZOO) if THOROUGH or n % 3 == 1 or each.name in ONLY_HERE]
MEMBERS = [each for each in MEMBERS if THOROUGH or each.name != "metric_in_the_objective"]


@pytest.mark.parametrize(("training", "first"), dealt(MEMBERS, [1, LATE]), ids=lambda each: getattr(each, "name", each))
def test_memory_that_runs_out(training: Training, first: int) -> None:
    try:
        parts, sizes, faults, words = accepted(training, first) if training.coupled else survived(training, first)
    except Exception as error:
        if training.oom not in ("told", "refuses"):
            raise
        said = [str(error), *getattr(error, "__notes__", ())]
        assert training.is_told(said), said  # it may also go well
        return
    assert training.oom != "refuses"
    assert faults.fired
    seen = parts.everything()
    expected = without_plateau(training.build())
    by_hand(expected, epochs=epochs_for(first), sizes=sizes)
    found = differences(seen, expected.everything(), close=1e-5 if training.oom == "close" else None)
    if training.oom == "told" and found:
        assert training.is_told(words), f"{found}, and the warnings were {words}"
    else:
        assert not found


def test_batch_normalisation_in_micro_batches_is_told_once() -> None:
    training = next(each for each in ZOO if each.name == "cnn_with_batchnorm")
    *_, words = survived(training, first=2)
    assert sum("normalisation" in word for word in words) == 1
