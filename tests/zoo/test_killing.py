"""The zoo, killed: a run that goes on from its checkpoints ends as one that never was, or says what differs."""

import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from ..thorough import THOROUGH, some
from ..warm import Warm
from .trainings import ZOO, Killed, Parts, Training, differences

EVER = 10**6
pytestmark = pytest.mark.usefixtures("light_heap")
ONLY_HERE = (  # what a step that is repeated leaves alone: loaders, schedules, averages, generators that all share
    "optimizer_with_attributes",
    "sampler_with_state",
    "number_in_a_config_object",
    "loader_of_ones_own",
    "loader_with_workers",
    "reduce_on_plateau",
    "one_cycle_each_step",
    "layer_unfrozen_in_mid_run",
    "tensor_that_is_no_buffer",
    "dataset_that_draws_from_the_global_one",
    "scheduled_sampling_by_python",
    "averaged_model_in_a_hook",
    "averaged_model_that_is_handed_over",
    "iterable_without_length",
    "dataset_that_counts",
    "collate_with_state",
)
# One of three, and these; those that are left out are tuned or run out of memory.
MEMBERS = [each for n, each in enumerate(ZOO) if THOROUGH or n % 3 == 2 or each.name in ONLY_HERE]
members = pytest.mark.parametrize("training", MEMBERS, ids=lambda training: training.name)


def epochs_of(parts: Parts) -> int:
    """So that updates come after the kill."""
    return 3 if THOROUGH or parts.accumulate > 1 else 2


def saved(training: Training, folder: Path, every: str, killed: int, *, resume: bool) -> Parts:
    """Train with checkpoints, everything built anew; killed after so many updates."""
    parts = training.build()
    loop = parts.loop("plain", parts.halt(killed, Killed))
    options: dict[str, Any] = {"save": folder, "every": every, "resume": resume, "progress": False}
    loop.fit(parts.loader, epochs=epochs_of(parts), device_transform=parts.transform, monitor=False, **options)
    return parts


def never_killed(training: Training) -> Any:
    """Everything at the end of the run without a kill."""
    parts = training.build()
    loop = parts.loop("plain", parts.halt(EVER, Killed))
    options: dict[str, Any] = {"device_transform": parts.transform, "progress": False, "monitor": False}
    loop.fit(parts.loader, epochs=epochs_of(parts), **options)
    return parts.everything()


@members
def test_a_killed_run_goes_on(training: Training, tmp_path: Path) -> None:
    """From a checkpoint between two epochs, which have five batches each, or from one inside an epoch; nightly both."""
    expected = never_killed(training)
    first = random.Random(training.name).randint(6, 7)  # noqa: S311
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kills = [("5 steps", first), ("2 steps", 8)]
        for every, moment in kills if THOROUGH else kills[ZOO.index(training) % 2 :][:1]:
            with pytest.raises(Killed):
                saved(training, tmp_path / "run", every, moment, resume=THOROUGH and every == "2 steps")
        parts = saved(training, tmp_path / "run", "3 steps", EVER, resume=True)
    words = [str(warning.message) for warning in caught]
    found = differences(parts.everything(), expected)
    if training.resume == "exact":
        assert not words
        assert not found
    elif found:
        assert training.is_told(words), f"{found}, and the warnings were {words}"


NAMES = some(
    [
        "dropout",
        "cnn_with_batchnorm",
        "one_cycle_each_step",
        "gan",
        "replay_queue",
        "dataset_that_draws_from_the_global_one",
    ],
    ["gan", "dataset_that_draws_from_the_global_one"],
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_killed_at_random_moments(tmp_path: Path, warm: Warm) -> None:
    script = Path(__file__).with_name("killing.py")
    ran = warm.run(script, str(tmp_path), *NAMES, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.keys() == set(NAMES)
    assert not any(each.get("error") for each in found.values()), (found, ran.stderr[-3000:])
    assert not any(each["differences"] for each in found.values()), found
