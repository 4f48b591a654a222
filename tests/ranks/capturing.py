"""How ranks agree on CUDA graphs, without a GPU: `capturing.py FOLDER`; a graph is a double that runs the eager step.

What is captured, what it is replayed on and who votes for what is hotloop's own. Each scene trains with captures and
without; every rank writes how often it replayed, its last plan, and whether the weights are the same.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.levers.cuda_graph import GraphLever
from hotloop.step import captured, dispatching, sharding
from hotloop.step.captured_graph import CannotCapture
from hotloop.training import collective

RANK = int(os.environ["RANK"])
ROWS = 163  # of which an epoch ends with a smaller batch, and one that counts for nothing
EPOCHS = 3
BATCH = 8


class EagerGraph:
    """What a capture gives, here: a replay runs the eager step on the static batch."""

    replays = 0
    norms: Sequence[Tensor] = ()
    gradients: Sequence[Any] = ()

    def __init__(self, step: Any) -> None:
        self._step, self.result = step, ({}, 0)

    def replay(self) -> None:
        EagerGraph.replays += 1
        with ExitStack() as around:
            for eager in self._step.eagers:
                around.enter_context(eager.capturing(lambda parts, count: setattr(self, "result", (parts, count))))
            for call in self._step._calls:
                call(self._step._static, None)


class NoRates:
    """Learning rates stay where they are."""

    def __init__(self, *_: Any) -> None: ...

    def of_step(self, step: int) -> Any:
        return nullcontext()

    def now(self) -> list[float]:
        return []

    def send(self, rates: Any) -> None: ...

    def changed(self) -> None: ...


@contextmanager
def capturing(step: Any, *, afresh: bool, pool: Any = None) -> Iterator[EagerGraph]:
    """Calls in here do nothing."""
    if (why := failing.get("why")) is not None and RANK == 1:
        raise CannotCapture(why)
    calls, step._calls = step._calls, []
    step._seen_parts, step._seen_count = {}, 0
    yield EagerGraph(step)
    step._calls, step.has_captures = calls, True


failing: dict[str, str] = {}
GraphLever.impossible = lambda self, target, plan: None
GraphLever.apply = lambda self, model, optimizers, plan: ()
captured.CapturedStep.capturing = capturing
captured.CapturedStep._stance = lambda self: captured.Stance([], [], [], [], [], ())
captured.Rates = NoRates
dispatching.FEW = -1  # else the values of small tensors on a CPU count as numbers, which differ from step to step
captured.capture_stream = lambda device: SimpleNamespace(stream=None, running=nullcontext)
sharding.why_not_captured = collective.why_not_captured = lambda ranks, plan: None


class Network(nn.Module):
    """With a buffer that DDP takes from rank 0 in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 20), nn.Linear(20, 5, bias=False)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        out: Tensor = self.last(hidden - self.mean)
        return out


class Counting(Network):
    """On rank 1 it changes a number in each call, which a replay would leave out."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += RANK
        return super().forward(x)


class Spare(Network):
    """With a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


def rows() -> TensorDataset:
    x = torch.rand(ROWS, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) * 7).long() % 5)


class Ragged:
    """Batches of which one in seven has fewer items, on one rank alone."""

    is_sharded = True
    batch_size = BATCH

    def __init__(self) -> None:
        self.dataset = self

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[Any]:
        x, y = rows().tensors
        for number in range(len(self)):
            size = BATCH - 3 * (number % 7 == RANK)
            start = (number * 2 + RANK) * 4
            yield x[start : start + size], y[start : start + size]


def forgets(record: Any) -> None:
    """On rank 1 the graphs are dropped in the middle of an epoch, as where memory has run out."""
    if record.step == 18 and RANK == 1:
        record.loop._core.step.forget_captures()


def dealt() -> DataLoader[Any]:
    return DataLoader(rows(), BATCH, shuffle=True)


SCENES: dict[str, tuple[type[nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "tails": (Network, dealt, {}),
    "ignored": (Network, dealt, {"loss": nn.CrossEntropyLoss(ignore_index=3)}),
    "ragged": (Network, Ragged, {}),
    "forgets": (Network, dealt, {"on_step": forgets}),
    "counts": (Counting, dealt, {}),
    "unused": (Spare, dealt, {}),
    "fails": (Network, dealt, {"failing": {"why": "a reason of its own"}}),
}
SAME = ("forgets", "counts", "unused", "fails")  # whose weights are those of "tails"


def trained(name: str, graph: int) -> tuple[hotloop.Loop, Any, list[str]]:
    kind, data, options = SCENES[name]
    torch.manual_seed(10 * RANK)
    failing.clear()
    failing.update(options.get("failing", {}))
    EagerGraph.replays = 0
    model = kind()
    torch.manual_seed(3)
    loss = options.get("loss", nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loop = hotloop.Loop(model, optimizer, loss, device="cpu", plan=hotloop.Plan("cpu", graph=graph, stream="direct"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        on_step = options.get("on_step") if graph else None
        report = loop.fit(data(), epochs=EPOCHS, progress=False, monitor=False, on_step=on_step)
    return loop, report, [str(each.message) for each in said]


def main() -> None:
    told: dict[str, Any] = {}
    eager = {name: trained(name, 0)[0].state_dict()["model"] for name in SCENES if name not in SAME}
    for name in SCENES:
        loop, report, said = trained(name, 1)
        now, then = loop.state_dict()["model"], eager["tails" if name in SAME else name]
        told[name] = {
            "replays": EagerGraph.replays,
            "graph": loop.plan.graph,
            "steps": report.steps,
            "apart": max(float((now[key] - then[key]).abs().max()) for key in then),
            "said": [words for words in said if "captured" in words],
            "why": [change.why for change in report.plans[1:]],
        }
    Path(sys.argv[1], f"told {RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
