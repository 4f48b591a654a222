"""The zoo, killed: a run that goes on from its checkpoints ends as one that never was, or says what differs."""

import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from ..thorough import THOROUGH, some, two_of_three
from ..warm import Warm
from .trainings import ZOO, Killed, Parts, Training, differences

EPOCHS, EVER = 3, 10**6
pytestmark = pytest.mark.usefixtures("light_heap")
# Those that are left out are tuned and run out of memory.
members = pytest.mark.parametrize("training", two_of_three(ZOO, 2), ids=lambda training: training.name)


def saved(training: Training, folder: Path, every: str, killed: int, *, resume: bool) -> Parts:
    """Train with checkpoints, everything built anew; killed after so many updates."""
    parts = training.build()
    loop = parts.loop("plain", parts.halt(killed, Killed))
    options: dict[str, Any] = {"save": folder, "every": every, "resume": resume, "progress": False}
    loop.fit(parts.loader, epochs=EPOCHS, device_transform=parts.transform, monitor=False, **options)
    return parts


def never_killed(training: Training) -> Any:
    """Everything at the end of the run without a kill."""
    parts = training.build()
    loop = parts.loop("plain", parts.halt(EVER, Killed))
    loop.fit(parts.loader, epochs=EPOCHS, device_transform=parts.transform, progress=False, monitor=False)
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
    ["cnn_with_batchnorm", "gan", "dataset_that_draws_from_the_global_one"],
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
