"""Ranks with GPUs: two processes that share one over gloo, and one process with NCCL, train as a process alone does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Launcher
from .scenes import SCENES

HERE = Path(__file__).parent
CLOSE = 1e-5  # of weights after up to 36 updates in fp32; a GPU's sums of products come in an order of its own
APART = ("tuned",)  # its plan rounds to bf16

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenes")


@pytest.mark.parametrize("name", [name for name in SCENES if name not in APART])
def test_two_ranks_that_share_a_gpu_train_as_one_process_does(name: str, launch: Launcher, folder: Path) -> None:
    shared = {"SCENE_DEVICE": "cuda:0", "HOTLOOP_DEVICE": ""}
    for ranks in (1, 2):
        for rank in launch(HERE / "scenes.py", str(folder), name, ranks=ranks, each=lambda _: shared).wait():
            assert rank.code == 0, rank.err
    alone = torch.load(folder / f"{name} 1 0.pt", weights_only=True)
    both = [torch.load(folder / f"{name} 2 {rank}.pt", weights_only=True) for rank in range(2)]
    assert all(torch.equal(both[0][key], both[1][key]) for key in alone), "replicas are the same to the bit"
    assert max(float((both[0][key] - alone[key]).abs().max()) for key in alone) < CLOSE
    one, two = (json.loads((folder / f"{name} {ranks} 0.json").read_text()) for ranks in (1, 2))
    assert [epoch["items"] for epoch in two["epochs"]] == [epoch["items"] for epoch in one["epochs"]]


IN_ONE = (
    "plain",
    "accumulated",
    "ignored_and_accumulated",
    "sharded",
    "sharded_and_checkpointed",
    "best",
    "normalised",
)


def run_in_one(folder: Path, *names: str) -> None:
    """The same script by `python` and by torchrun, where it makes the group itself."""
    script = [str(HERE / "scenes.py"), str(folder), *names]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    for how, backend in (([], ""), (torchrun, "nccl")):
        environment = {**os.environ, "SCENE_DEVICE": "cuda:0", "HOTLOOP_DEVICE": "", "SCENE_BACKEND": backend}
        ended = subprocess.run(
            [sys.executable, *how, *script], check=False, capture_output=True, text=True, timeout=240, env=environment
        )
        assert ended.returncode == 0, ended.stderr


def told_in_one(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a scene tells without a group and in one; its weights are the same."""
    alone, grouped = (torch.load(folder / f"{name} {n} 0.pt", weights_only=True) for n in ("1", "1nccl"))
    assert max(float((grouped[key] - alone[key]).abs().max()) for key in alone) < CLOSE, name
    plain, other = (json.loads((folder / f"{name} {n} 0.json").read_text()) for n in ("1", "1nccl"))
    return plain, other


def test_a_group_of_one_rank_with_nccl_trains_as_a_process_without_does(folder: Path) -> None:
    """DDP, FSDP2, `SyncBatchNorm`."""
    one = folder / "one"
    one.mkdir()
    run_in_one(one, *IN_ONE)
    for name in IN_ONE:
        plain, other = (each["epochs"] for each in told_in_one(one, name))
        assert [epoch["items"] for epoch in other] == [epoch["items"] for epoch in plain]
        assert [epoch["loss"] for epoch in other] == pytest.approx([epoch["loss"] for epoch in plain], abs=CLOSE)
