"""Growth: each classic leak is named with its line and its holder, and healthy loops are left alone."""

import gc
import inspect
import json
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotloop.apps.leaks.growth import Growth, Leak, watch_growth

from ..warm import Warm

STEPS = 9
ROWS = 32
pytestmark = pytest.mark.usefixtures("light_heap")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(hidden)


class Trainer:
    """A loop with everything that is healthy in it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.history: list[Tensor] = []

    def batch(self, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 16), torch.randint(4, (rows,))

    def loss(self, rows: int = ROWS) -> Tensor:
        x, y = self.batch(rows)
        return F.cross_entropy(self.model(x), y)

    def step(self, rows: int = ROWS) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(rows)
        loss.backward()
        self.optimizer.step()
        return loss


def steps(growth: Growth, count: int = STEPS) -> Iterator[int]:
    """The numbers of steps that the watch is told of."""
    for step in range(count):
        yield step
        growth.step()


def line_with(code: str) -> str:
    """`file:line: code` of the line of this file that ends in a mark."""
    lines = inspect.getsource(inspect.getmodule(line_with)).splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {code}"))
    return f"test_growth.py:{number}: "


def test_losses_in_a_list_keep_their_graphs() -> None:
    trainer, losses = Trainer(), []
    with watch_growth() as growth:
        for _ in steps(growth):
            losses.append(trainer.loss())  # kept losses
        (leak,) = growth.leaks()
    assert leak.kind == "graph"
    assert leak.holder == "list `losses`, a local of `test_losses_in_a_list_keep_their_graphs`"
    assert leak.line is not None
    assert line_with("kept losses") in leak.line
    assert "losses.append(trainer.loss().detach())" in leak.fix
    assert Leak.from_json(json.loads(json.dumps(leak.to_json()))) == leak
    assert str(leak).splitlines()[-1].strip().startswith("fix: ")
    hidden, inputs, targets, probabilities = ROWS * 64 * 4, ROWS * 16 * 4, ROWS * 8, ROWS * 4 * 4
    assert leak.bytes_per_step == hidden + inputs + targets + probabilities + 4 + 4  # the loss and its weight
    assert leak.steps >= 5
    largest = leak.leftovers[0]
    assert (largest.shape, largest.dtype) == ((ROWS, 64), "float32")
    assert largest.count >= STEPS - 1
    assert largest.line is not None
    assert "torch.relu" in largest.line


def test_what_is_kept_after_its_backward_pass_is_found_though_it_is_small() -> None:
    trainer, losses, total = Trainer(), [], 0
    with watch_growth() as growth:
        for _ in steps(growth):
            losses.append(trainer.step())  # small losses
            loss = trainer.step()
            total += loss  # running total
        leaks = growth.leaks()
    kept, added = sorted(leaks, key=lambda leak: "total" in leak.holder)
    assert kept.kind == added.kind == "graph"
    assert line_with("small losses") in str(kept.line)
    assert kept.fix.startswith("losses.append(trainer.step().detach())")
    assert 0 < kept.bytes_per_step < 100
    assert "`total`" in added.holder
    assert line_with("running total") in str(added.line)
    assert added.fix.startswith("total += loss.detach()")
    assert "memory of the host" in str(added)


def test_a_running_total_without_a_backward_pass_counts_its_bytes() -> None:
    trainer, total = Trainer(), torch.zeros(())
    with watch_growth() as growth:
        for _ in steps(growth):
            total = total + trainer.loss()
        (leak,) = growth.leaks()
    assert leak.kind == "graph"
    assert "`total`" in leak.holder
    assert leak.bytes_per_step > ROWS * 64 * 4


def test_a_hook_that_stores_activations_is_named() -> None:
    trainer, stored = Trainer(), []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        stored.append(output.detach())  # from the hook

    trainer.model.first.register_forward_hook(keep)
    with watch_growth() as growth:
        for _ in steps(growth):
            trainer.step()
        (leak,) = growth.leaks()
    assert leak.kind == "hook"
    assert "`keep`" in leak.what
    assert "`stored`" in leak.holder
    assert line_with("from the hook") in str(leak.line)
    assert "handle.remove()" in leak.fix
    assert leak.bytes_per_step == ROWS * 64 * 4


def test_kept_exceptions_keep_the_variables_of_their_frames() -> None:
    trainer, errors = Trainer(), []

    def fails(x: Tensor) -> None:
        doubled = x * 2
        raise ValueError(doubled.shape)

    with watch_growth() as growth:
        for _ in steps(growth):
            try:
                fails(trainer.batch()[0])
            except ValueError as error:
                errors.append(error)  # kept error
        (leak,) = growth.leaks()
    assert leak.kind == "traceback"
    assert "`fails`" in leak.what
    assert "`errors`" in leak.holder
    assert "str(error)" in leak.fix
    assert leak.bytes_per_step == 2 * ROWS * 16 * 4


def test_batches_that_are_kept_in_an_attribute_a_dict_a_global_and_a_closure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The global is that of a new module: no garbage collection looks at those that were there before."""
    (tmp_path / "leaking.py").write_text("GLOBAL = []\n\ndef keep(tensor):\n    GLOBAL.append(tensor)\n")
    monkeypatch.syspath_prepend(tmp_path)
    keep = import_module("leaking").keep
    trainer, by_step, cache = Trainer(), {}, list[Tensor]()

    def made(closed: list[Tensor]) -> Callable[[], None]:
        def remember() -> None:
            closed.append(torch.randn(1000))

        return remember

    remember = made(cache)
    del cache
    with watch_growth() as growth:
        for step in steps(growth):
            remember()
            trainer.history.append(torch.randn(500))
            by_step[step] = torch.randn(600)
            keep(torch.randn(700))
        leaks = growth.leaks()
    assert [(leak.kind, leak.bytes_per_step) for leak in leaks] == [("tensors", n) for n in (4000, 2800, 2400, 2000)]
    assert leaks[0].holder == "list `closed`, a variable that `remember` closes over"
    assert leaks[1].holder.startswith("list `GLOBAL`, a global of ")
    assert leaks[2].holder.startswith("dict `by_step`, a local of ")
    assert leaks[3].holder == "list `history`, an attribute of `Trainer`"
    assert "leaking.py" in str(leaks[1].line)


def test_a_state_that_is_carried_on_with_its_graph_is_found() -> None:
    cell, state = nn.GRUCell(16, 16), torch.zeros(ROWS, 16)
    with watch_growth() as growth:
        for _ in steps(growth):
            state = cell(torch.randn(ROWS, 16), state)  # carried state
            state.sum().backward(retain_graph=True)
        (leak,) = growth.leaks()
    assert leak.kind == "graph"
    assert leak.bytes_per_step > ROWS * 16 * 4
    assert "`state`" in leak.holder
    assert line_with("carried state") in str(leak.line)
    assert leak.fix.startswith("state = state.detach()")


def test_a_script_without_functions_is_understood(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from hotloop.apps.leaks.growth import watch_growth\n"
        "weight, losses = torch.ones(500, requires_grad=True), []\n"
        "with watch_growth() as growth:\n"
        "    for _ in range(8):\n"
        "        loss = weight.square().sum() ** 2\n"
        "        losses.append(loss)\n"
        "        growth.step()\n"
        "    print(*growth.leaks(), sep='\\n\\n')\n"
    )
    done = warm.run(script.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held by list `losses`, a global of train.py" in done.stdout
    assert "at train.py:7: losses.append(loss)" in done.stdout
    assert "made at train.py:6" in done.stdout
    assert "fix: losses.append(loss.detach())" in done.stdout
    assert "\n\n" not in done.stdout  # one leak only


def test_reference_cycles_are_told_apart() -> None:
    gc.collect()
    gc.disable()
    try:
        with watch_growth() as growth:
            for _ in steps(growth):
                ring = [torch.randn(1000)]
                ring.append(ring)  # type: ignore[arg-type]
            (leak,) = growth.leaks()
    finally:
        gc.enable()
    assert leak.kind == "cycle"
    assert "gc.collect()" in leak.fix


def trains(kind: type[torch.optim.Optimizer]) -> Callable[[Growth], None]:
    """Whose state appears once, and whose last loss lives on."""

    def work(growth: Growth) -> None:
        trainer = Trainer()
        trainer.optimizer = kind(trainer.model.parameters(), lr=0.01)
        for _ in steps(growth):
            loss = trainer.step()
        assert loss is not None

    return work


def keeps_a_log_of_numbers(growth: Growth) -> None:
    trainer, log, numbers = Trainer(), [], []
    for _ in steps(growth):
        loss = trainer.step()
        log.append(loss.detach())
        numbers.append(loss.item())


def keeps_a_window_that_is_full(growth: Growth) -> None:
    window: deque[Tensor] = deque(maxlen=6)
    for _ in steps(growth, 16):
        window.append(torch.randn(1000))


def takes_batches_that_grow(growth: Growth) -> None:
    trainer = Trainer()
    for step in steps(growth):
        x, y = trainer.batch(8 * (step + 1))
        output = trainer.model(x)
        F.cross_entropy(output, y).backward()
    assert output.shape == (8 * STEPS, 4)


def makes_more_in_each_step(growth: Growth) -> None:
    for step in steps(growth):
        parts = [torch.randn(1000) for _ in range(step + 1)]
    assert len(parts) == STEPS


def has_an_optimizer_with_a_history(growth: Growth) -> None:
    trainer = Trainer()
    trainer.optimizer = torch.optim.LBFGS(trainer.model.parameters(), max_iter=2, history_size=100)
    x, y = trainer.batch()

    def closure() -> Tensor:
        trainer.optimizer.zero_grad()
        loss = F.cross_entropy(trainer.model(x), y)
        loss.backward()
        return loss

    for _ in steps(growth):
        trainer.optimizer.step(closure)


HEALTHY = {
    "SGD": trains(torch.optim.SGD),
    "Adam": trains(torch.optim.Adam),
    "Adagrad": trains(torch.optim.Adagrad),
    "log": keeps_a_log_of_numbers,
    "window": keeps_a_window_that_is_full,
    "growing batches": takes_batches_that_grow,
    "more tensors": makes_more_in_each_step,
    "LBFGS": has_an_optimizer_with_a_history,
}


@pytest.mark.parametrize("work", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_loop_has_no_leak(work: Callable[[Growth], None]) -> None:
    with watch_growth() as growth:
        work(growth)
        assert growth.leaks() == ()


def test_too_few_steps_say_nothing() -> None:
    kept = []
    with watch_growth() as growth:
        assert growth.leaks() == ()
        for _ in steps(growth, 5):
            kept.append(torch.randn(1000))
        assert growth.leaks() == ()


def test_an_error_inside_ends_the_watch() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    with pytest.raises(KeyError), watch_growth():
        raise KeyError
    assert _get_current_dispatch_mode() is None


@pytest.mark.gpu
@pytest.mark.parametrize("keeps", [True, False])
def test_a_leak_on_a_gpu_names_its_list_and_a_healthy_loop_has_none(keeps: bool) -> None:
    trainer, losses = Trainer(Net().cuda()), []
    with watch_growth("cuda") as growth:
        for _ in steps(growth):
            x, y = (part.cuda() for part in trainer.batch())
            trainer.optimizer.zero_grad()
            loss = F.cross_entropy(trainer.model(x), y)
            if keeps:
                losses.append(loss)
            else:
                loss.backward()
                trainer.optimizer.step()
        leaks = growth.leaks()
    assert [(leak.kind, "`losses`" in leak.holder) for leak in leaks] == [("graph", True)] * keeps
    assert all(leak.bytes_per_step >= ROWS * 64 * 4 for leak in leaks)


def test_a_lazy_layer_anywhere_in_the_process_is_no_obstacle() -> None:
    """Its weights have no memory before the first batch decides their shape."""
    lazy = nn.LazyLinear(3)
    with watch_growth() as growth:
        growth.step()
    assert lazy.weight is not None


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # of PyTorch, which calls them a prototype
def test_nested_tensors_are_watched() -> None:
    rows = [torch.ones(256), torch.ones(512)]
    kept = []
    with watch_growth() as growth:
        for _ in steps(growth):
            kept.append(torch.nested.nested_tensor(rows) * 2)
        (leak,) = growth.leaks()
    assert leak.bytes_per_step == 768 * 4
