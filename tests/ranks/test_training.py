"""Two processes over gloo train what one process trains on their batches together."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hotloop
from hotloop.checkpoint.weights import export_weights
from hotloop.errors import BadArgument
from hotloop.levers.base import LeverTarget
from hotloop.levers.cuda_graph import GraphLever

from ..thorough import some
from ..warm import Warm
from .conftest import Launch, Launcher
from .scenes import SCENES

HERE = Path(__file__).parent
RESUMING = HERE / "resuming.py"
CLOSE = 1e-6  # of weights after up to 202 updates in fp32, whose gradients are added up in another order
BY_BATCH = ("ignored", "ignored_and_accumulated", "picked", "summed")  # which show the mean of the batches' losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenes")


@pytest.fixture
def ended(launch: Launcher, folder: Path) -> Path:
    """Where all scenes have left their weights: run once, alone and on two ranks."""
    for ranks in (1, 2):
        if not any(folder.glob(f"* {ranks} 0.pt")):
            for rank in launch(HERE / "scenes.py", str(folder), ranks=ranks).wait():
                assert rank.code == 0, rank.err
                assert not rank.err or ranks == 1, "nothing is said that a single process does not say"
    return folder


def weights(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SCENES)
def test_two_ranks_train_as_one_process_does(name: str, ended: Path) -> None:
    alone = weights(ended / f"{name} 1 0.pt")
    ranks = [weights(ended / f"{name} 2 {rank}.pt") for rank in range(2)]
    assert all(torch.equal(ranks[0][key], ranks[1][key]) for key in alone), "replicas are the same to the bit"
    assert max(float((ranks[0][key] - alone[key]).abs().max()) for key in alone) < CLOSE
    one, *others = (json.loads((ended / f"{name} {n}.json").read_text()) for n in ("1 0", "2 0", "2 1"))
    assert others[0]["plans"] == others[1]["plans"]
    for other in others:
        assert other["steps"] == one["steps"]
        assert [epoch["items"] for epoch in other["epochs"]] == [epoch["items"] for epoch in one["epochs"]]
        if name not in BY_BATCH:
            for epoch, same in zip(other["epochs"], one["epochs"], strict=True):
                assert epoch == pytest.approx(same, abs=1e-6), "losses and metrics are those of all samples"


IN_ONE = ("plain", "ignored_and_accumulated", "sharded", "sharded_and_checkpointed")


def test_a_script_that_makes_its_group_of_one_rank_trains_in_it_as_without(launch: Launcher, ended: Path) -> None:
    [rank] = launch(HERE / "scenes.py", str(ended), *IN_ONE, ranks=1, each=lambda _: {"SCENE_BACKEND": "gloo"}).wait()
    assert rank.code == 0, rank.err
    for name in IN_ONE:
        alone, grouped = weights(ended / f"{name} 1 0.pt"), weights(ended / f"{name} 1gloo 0.pt")
        assert max(float((grouped[key] - alone[key]).abs().max()) for key in alone) < CLOSE, name
        one, other = (json.loads((ended / f"{name} {n} 0.json").read_text())["epochs"] for n in ("1", "1gloo"))
        for epoch, same in zip(other, one, strict=True):
            assert epoch == pytest.approx(same, abs=1e-6), name


def test_the_tuner_decides_once_for_all_ranks(ended: Path) -> None:
    told = [json.loads((ended / f"tuned {ranks} 0.json").read_text())["plans"] for ranks in (1, 2)]
    assert len(told[1]) > 1, "a plan was adopted"
    assert told[1] == told[0]


@pytest.mark.parametrize(
    ("parallel", "step"),
    # The tenth batch is smaller, and the first one after that.
    some([("ddp", 8), ("fsdp", 8), ("ddp slowly", 10)], [("fsdp", 8), ("ddp slowly", 10)]),
)
def test_a_run_that_is_killed_on_one_rank_ends_with_the_weights_of_one_that_was_not(
    parallel: str, step: int, launch: Launcher, tmp_path: Path
) -> None:
    names = (f"{parallel} whole", f"{parallel} killed")
    assert all(rank.code == 0 for rank in launch(RESUMING, str(tmp_path), names[0]).wait())
    killed = launch(RESUMING, str(tmp_path), names[1], "1", str(step)).wait()
    assert killed[1].code == -9
    assert killed[0].code not in (0, None), "the other rank does not go on alone"
    again = launch(RESUMING, str(tmp_path), names[1]).wait()
    assert all(rank.code == 0 for rank in again), again[0].err
    assert not any("would hold other items" in rank.err for rank in again)
    for rank in range(2):
        whole, resumed = (weights(tmp_path / f"end {name} 2 {rank}.pt") for name in names)
        assert all(torch.equal(whole[key], resumed[key]) for key in whole), "dropout included, to the bit"
    told = [json.loads((tmp_path / f"end {name} 2 0.json").read_text()) for name in names]
    assert told[1]["resumed"] == 1
    assert told[1]["epochs"] == told[0]["epochs"]
    saved = export_weights(tmp_path / f"saved {names[1]}", tmp_path / "model.safetensors")
    assert len([*saved.glob("rank-*-of-2.safetensors")]) == (2 if parallel == "fsdp" else 0), "each rank writes its own"
    one_file, whole = hotloop.read_weights(tmp_path / "model.safetensors"), weights(tmp_path / f"end {names[0]} 2 0.pt")
    assert all(torch.equal(one_file[key], whole[key]) for key in whole)


RESUMED = [("fsdp", 2, 1, ""), ("fsdp", 2, 4, ""), ("fsdp", 1, 2, ""), ("ddp", 2, 4, ""), ("fsdp", 1, 1, "gloo")]


@pytest.fixture(scope="module")
def begun(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A run without dropout that was killed, with its checkpoint; 0 ranks: one that ended in one process."""

    @cache
    def run(parallel: str, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("begun")
        kill = ("0", "8") if ranks else ()
        ended = Launch(warm, RESUMING, str(folder), f"{parallel} without dropout", *kill, cwd=folder, ranks=ranks or 1)
        assert ended.wait()[0].code == (-9 if ranks else 0)
        return folder

    return run


@pytest.mark.parametrize(
    ("parallel", "before", "after", "backend"),
    some(RESUMED, [each for each in RESUMED if each != ("fsdp", 2, 4, "")]),  # fsdp with more ranks, ddp with four
)
def test_a_checkpoint_is_resumed_with_other_ranks(
    parallel: str,
    before: int,
    after: int,
    backend: str,
    launch: Launcher,
    begun: Callable[[str, int], Path],
    tmp_path: Path,
) -> None:
    shutil.copytree(begun(parallel, before), tmp_path, dirs_exist_ok=True)
    grouped = {"SCENE_BACKEND": backend} if backend else {}  # the second part of the run is in a group of its own
    name = f"{parallel} without dropout"
    ended = launch(RESUMING, str(tmp_path), name, ranks=after, each=lambda _: grouped).wait()
    assert all(rank.code == 0 for rank in ended), ended[0].err
    assert "batch size has changed" not in ended[0].err
    whole = json.loads((begun("ddp", 0) / "end ddp without dropout 1 0.json").read_text())
    told = json.loads((tmp_path / f"end {name} {after} 0.json").read_text())
    assert told["resumed"] == 1
    assert told["steps"] == whole["steps"]
    for epoch, same in zip(told["epochs"], whole["epochs"], strict=True):
        assert epoch == pytest.approx(same, abs=1e-5)


def test_a_rank_does_not_tune_by_itself() -> None:
    model = torch.nn.Linear(2, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss(), device="cpu")
    loop._core.ranks.size = 2
    with pytest.raises(BadArgument, match="2 ranks"):
        loop.tune([(torch.rand(4, 2), torch.rand(4, 1))])


def test_a_cuda_graph_is_possible_for_one_process_alone() -> None:
    model = torch.nn.Linear(2, 1)
    target = LeverTarget(torch.device("cuda"), model, [torch.optim.SGD(model.parameters(), 0.1)])
    lever = GraphLever()
    assert lever.impossible(target, hotloop.Plan("cuda")) is None
    assert "several ranks" in str(lever.impossible(replace(target, on_ranks=True), hotloop.Plan("cuda")))


def test_sigterm_on_one_rank_saves_and_ends_all(launch: Launcher, tmp_path: Path) -> None:
    ended = launch(RESUMING, str(tmp_path), "told to stop", "1", "7", "SIGTERM").wait()
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    told = [json.loads((tmp_path / f"end told to stop 2 {rank}.json").read_text()) for rank in range(2)]
    assert told[0]["stopped"] == "another rank"
    assert told[0]["steps"] == told[1]["steps"] < 15
    assert all(rank.code == 0 for rank in launch(RESUMING, str(tmp_path), "told to stop").wait())
    assert json.loads((tmp_path / "end told to stop 2 0.json").read_text())["steps"] == 15


@pytest.mark.parametrize("aspect", ["compiled", "ddp", "fsdp", "scored", "unwritten", "slowly", "uncaptured"])
def test_ranks_have_this_in_common(aspect: str, launch: Launcher) -> None:
    for rank in launch(HERE / "aspects.py", aspect).wait():
        assert rank.code == 0, rank.err
