"""Several GPUs, modelled from the simulation of one: what a rank holds and how long a step takes."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.parallel import OnRanks, on_ranks, ranks_words
from hotloop.apps.simulate.scaling import RankStep, cluster
from hotloop.apps.simulate.simulation_record import Simulation
from hotloop.apps.simulate.study import EVERYTHING
from hotloop.apps.simulate.timeline import repeated_block

GPU = card("h200")
DEEP = """
import torch
from torch import nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x):
        return x + self.out(self.into(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8192, 1024)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(1024, 8192, bias=False)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCH = 8
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for tokens in DataLoader(torch.randint(8192, (4 * BATCH, 128)), BATCH):
    tokens = tokens.cuda()
    optimizer.zero_grad(KEPT)
    nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
"""
BLOCK, ROOT = 4 * 2 * 1024 * 4096, 4 * 2 * 8192 * 1024
WEIGHTS = 6 * BLOCK + ROOT


@pytest.fixture(scope="module")
def simulated(simulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    path = tmp_path_factory.mktemp("deep") / "train.py"
    path.write_text(DEEP.replace("KEPT", ""))
    found: Simulation = simulator.run(path, [], GPU, listeners=EVERYTHING)
    return found


def ranks(found: Simulation, gpus: int, parallel: str, link: str = "nvlink4") -> OnRanks:
    told = on_ranks(found, GPU, gpus, parallel, cluster(link))
    assert told is not None
    return told


def test_the_step_of_one_gpu_is_told_in_its_parts(simulated: Simulation) -> None:
    rank = simulated.rank
    assert rank is not None
    assert simulated.step_ms is not None
    assert rank.seconds == pytest.approx(simulated.step_ms.median / 1e3, rel=0.01)
    assert min(rank.forward, rank.backward, rank.update) > 0
    assert rank.gradient_bytes == WEIGHTS
    assert [gradient.ready for gradient in rank.gradients] == sorted(gradient.ready for gradient in rank.gradients)
    assert [gradient.block for gradient in rank.gradients if gradient.block][0] == "blocks.5"  # noqa: RUF015
    root, blocks = rank.blocks()
    assert (root, [size for size, _ in blocks]) == (ROOT, [BLOCK] * 6)
    assert Simulation.from_json(simulated.to_json()).rank == rank


def test_gradients_that_stay_from_step_to_step_are_known_too(simulated: Simulation, run) -> None:
    kept = run(DEEP.replace("KEPT", "set_to_none=False"), card=GPU, listeners=EVERYTHING).result.rank
    assert kept is not None
    assert simulated.rank is not None
    named = [[(each.bytes, each.block) for each in rank.gradients] for rank in (kept, simulated.rank)]
    assert sorted(named[0]) == sorted(named[1])


def test_fsdp_shards_what_is_kept_and_holds_two_blocks_and_the_root(simulated: Simulation) -> None:
    for gpus in (2, 8, 64):
        memory = ranks(simulated, gpus, "fsdp").memory
        assert memory.parameters == pytest.approx(WEIGHTS / gpus, rel=0.01)
        assert memory.optimizer == pytest.approx(2 * WEIGHTS / gpus, rel=0.01)
        assert memory.whole == ROOT + 2 * BLOCK
    assert simulated.peak is not None
    held = [ranks(simulated, gpus, "fsdp").process for gpus in (2, 4, 8, 16, 1024)]
    assert held == sorted(held, reverse=True)
    assert held[0] < simulated.peak.process


def test_ddp_holds_all_and_buckets_beside_it(simulated: Simulation) -> None:
    assert simulated.peak is not None
    assert ranks(simulated, 1, "ddp").process == pytest.approx(simulated.peak.process, rel=0.001)
    two, many = (ranks(simulated, gpus, "ddp") for gpus in (2, 512))
    assert two.memory == replace(many.memory, gpus=2)
    assert two.memory.whole == WEIGHTS
    assert two.process > simulated.peak.process


def test_a_slow_link_costs_time_and_no_memory(simulated: Simulation) -> None:
    fast, slow = (ranks(simulated, 16, "ddp", link) for link in ("nvlink4", "ethernet10"))
    assert fast.process == slow.process
    assert fast.step is not None
    assert slow.step is not None
    assert slow.step.efficiency < 0.5 < fast.step.efficiency <= 1
    assert fast.step.throughput == pytest.approx(16 * 8 / fast.step.seconds)


def test_it_says_whether_a_rank_fits(simulated: Simulation) -> None:
    small = replace(GPU, memory=ranks(simulated, 64, "fsdp").high + 2**26)
    assert on_ranks(simulated, replace(GPU, memory=2**30), 2, "ddp", cluster("nvlink4")).fits is False  # type: ignore[union-attr]
    assert on_ranks(simulated, small, 64, "fsdp", cluster("nvlink4")).fits is not False  # type: ignore[union-attr]
    assert ranks(simulated, 2, "ddp").fits is True


def test_nothing_is_said_of_a_script_that_did_not_train(simulated: Simulation) -> None:
    for status in ("failed", "no-steps", "out-of-memory"):
        assert on_ranks(replace(simulated, status=status), GPU, 2, "ddp", cluster("nvlink4")) is None


def test_without_times_there_is_memory_alone(simulated: Simulation) -> None:
    told = ranks(replace(simulated, rank=None), 4, "fsdp")
    assert told.step is None
    assert told.memory.whole == pytest.approx(WEIGHTS, rel=0.01)  # what the blocks are is not known
    assert "a step takes" not in words(told)


def test_a_person_reads_that_it_is_modelled(simulated: Simulation) -> None:
    said = words(ranks(simulated, 64, "fsdp"))
    assert "64 GPUs with FSDP over NVLink 4 in nodes of 8, InfiniBand NDR 400: modelled, not measured" in said
    assert "each rank would take" in said
    assert "blocks that are gathered" in said
    assert "efficiency" in said
    assert "samples a second" in said
    assert "over Ethernet 10:" in words(ranks(simulated, 64, "ddp", "ethernet10"))


def words(told: OnRanks) -> str:
    console = Console(width=200, record=True, file=StringIO())
    for part in ranks_words(told):
        console.print(part)
    return console.export_text()


def test_blocks_are_told_by_their_path() -> None:
    assert repeated_block("encoder.layer.11.output.dense") == "encoder.layer.11"
    assert repeated_block("layer4.1.conv2") == "layer4.1"
    assert [repeated_block(path) for path in ("", "0", "head", "blocks.3")] == [""] * 4


def test_a_step_without_gradients_has_no_blocks() -> None:
    assert RankStep(1.0, 1.0, 1.0, ()).blocks() == (0, [])
