"""What two ranks do besides training what one process does: `aspects.py NAME`. Each rank checks what it sees."""

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenes import RANK, accuracy, blocks, loader, network, rows, trained
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

import hotloop
from hotloop.checkpoint.store import Store
from hotloop.errors import BadArgument
from hotloop.levers import compile as lever
from hotloop.records.files import write_json
from hotloop.step import compilation

SAVED = Path("saved")


def of_all(value: Any) -> list[Any]:
    """What each rank has."""
    every = [None, None]
    dist.all_gather_object(every, value)
    return every


class AotEager:
    """Dynamo and AOTAutograd trace as ever; their graphs run without Inductor, whose kernels other tests compile."""

    graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager_default_partitioner")(graph, inputs)


def compiled() -> None:
    """A training that is compiled ends as the same one run eagerly."""
    backend = AotEager()
    compilation.inductor = lever.inductor = lambda *_: backend
    weights = {}
    for mode in ("off", "default", "blocks"):
        torch.manual_seed(10 * RANK)
        data = loader(rows(items=96), drop_last=True)
        loop, _ = trained(blocks(), nn.CrossEntropyLoss(), data, epochs=2, plan=hotloop.Plan("cpu", compile=mode))
        assert (mode != "off") == (counters["stats"]["unique_graphs"] > 0)
        assert loop.plan.compile == mode
        counters.clear()
        weights[mode] = loop.state_dict()["model"]
        torch.testing.assert_close(weights[mode], weights["off"], rtol=0, atol=1e-5)


def normalised(parallel: str) -> None:
    """All ranks evaluate with the buffers of the first."""
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), plan=hotloop.Plan("cpu", parallel=parallel))
    held: list[Any] = []

    def hold(metrics: Any) -> None:
        held.append((metrics, [float(buffer.double().sum()) for buffer in model.buffers()]))

    def on_step(record: Any) -> str | None:
        if record.step == 8:
            hold(loop.evaluate(DataLoader(rows(), 7)))
        return "stop" if record.step == 13 else None

    options: dict[str, Any] = {"progress": False, "monitor": False, "on_step": on_step}
    data, held_out = loader(rows()), DataLoader(rows(), 7)
    loop.fit(data, epochs=9, validate=held_out, on_epoch=lambda record: hold(record.epoch.metrics), **options)
    hold(None)
    first, second = of_all(held)
    assert first == second
    assert len(first) == 4  # in an epoch, after two of them and at the end


def ddp() -> None:
    normalised("ddp")


def fsdp() -> None:
    normalised("fsdp")


def scored() -> None:
    """A checkpoint holds the training metrics of all ranks: a run that is stopped in an epoch and goes on has them."""

    def scores(name: str, stop: int = 0) -> list[dict[str, float]]:
        torch.manual_seed(0)
        model = network()
        optimizer, metrics = torch.optim.AdamW(model.parameters(), 1e-2), {"accuracy": accuracy}
        loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain", train_metrics=metrics)
        options: dict[str, Any] = {"progress": False, "monitor": False, "save": SAVED / name, "resume": True}
        ends = {stop: "stop"}
        report = loop.fit(loader(rows()), epochs=2, on_step=lambda record: ends.get(record.step), **options)
        assert bool(report.stopped) == bool(stop)
        return [dict(epoch.train_metrics) for epoch in report.epochs]

    whole = scores("whole")
    scores("stopped", stop=1)
    assert scores("stopped") == whole, whole


def unwritten() -> None:
    """All ranks save again where the first could not write."""
    write, failed = Store.write, []

    def failing(*args: Any, **options: Any) -> Any:
        if RANK == 0 and not failed:
            failed.append(1)
            raise OSError(28, "No space left on device")
        return write(*args, **options)

    Store.write = failing  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop, _ = trained(network(), nn.CrossEntropyLoss(), loader(rows()), save=SAVED, on_epoch=lambda record: "stop")
    assert loop.steps == 5
    assert [int(path.name.removeprefix("step-")) for path in SAVED.glob("step-*")] == [5]
    assert any("No space left" in str(each.message) for each in said) == (RANK == 0)


def slowly() -> None:
    """The report names the rank for which the others wait."""

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02 if RANK == 1 else 0.0)
            return x

    _, report = trained(network(Slow()), nn.CrossEntropyLoss(), loader(rows()), epochs=2)
    fast, slow = report.by_rank
    assert (fast.rank, slow.rank) == (0, 1)
    assert slow.own > fast.own + 0.01
    assert fast.waited > slow.waited
    assert f"the others wait for rank 1 on {slow.host}" in " ".join(str(report).split())


def uncaptured() -> None:
    """There are no CUDA graphs on ranks: a plan that has one is refused in words, a file of one goes on without."""

    def loop_of(plan: Any) -> hotloop.Loop:
        model = nn.Linear(2, 1)
        return hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cpu", plan=plan)

    refused = []
    for graph in (1, 16):
        try:
            loop_of(hotloop.Plan("cpu", graph=graph))
        except BadArgument as error:
            refused.append(str(error))
    assert len(refused) == 2
    for words in refused:
        assert "the plan has graph: several ranks exchange gradients in each step" in words
        assert "leave it out of the plan" in words
    file = Path(f"plan {RANK}.json")
    write_json(file, hotloop.Plan("cuda", graph=16, fused=True, levers=("row kernels",)).to_json())  # of one process
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        left = loop_of(file).plan
    assert (left.graph, left.fused, left.levers) == (0, True, ())
    assert any(f"{file} has graph, which is left out here: several ranks" in str(each.message) for each in said)


ASPECTS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (compiled, ddp, fsdp, scored, unwritten, slowly, uncaptured)
}

if __name__ == "__main__":
    ASPECTS[sys.argv[1]]()
