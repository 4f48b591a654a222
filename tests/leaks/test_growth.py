"""Growth: each classic leak is named with its line and its holder, and healthy loops are left alone."""

import gc
import inspect
import json
from collections import deque
from collections.abc import Callable
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


def line_with(code: str) -> str:
    """`file:line: code` of the line of this file that ends in a mark."""
    lines = inspect.getsource(inspect.getmodule(line_with)).splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {code}"))
    return f"test_growth.py:{number}: "


def test_losses_in_a_list_keep_their_graphs() -> None:
    trainer, losses = Trainer(), []
    with watch_growth() as growth:
        for _ in range(STEPS):
            losses.append(trainer.loss())  # kept losses
            growth.step()
        (leak,) = growth.leaks()
    assert leak.kind == "graph"
    assert leak.holder == "list `losses`, a local of `test_losses_in_a_list_keep_their_graphs`"
    assert leak.line is not None
    assert line_with("kept losses") in leak.line
    assert "losses.append(trainer.loss().detach())" in leak.fix
    hidden, inputs, targets, probabilities = ROWS * 64 * 4, ROWS * 16 * 4, ROWS * 8, ROWS * 4 * 4
    assert leak.bytes_per_step == hidden + inputs + targets + probabilities + 4 + 4  # the loss and its weight
    assert leak.steps >= 5
    largest = leak.leftovers[0]
    assert (largest.shape, largest.dtype) == ((ROWS, 64), "float32")
    assert largest.count >= STEPS - 1
    assert largest.line is not None
    assert "torch.relu" in largest.line


def test_losses_kept_after_their_backward_pass_are_found_though_they_are_small() -> None:
    trainer, losses = Trainer(), []
    with watch_growth() as growth:
        for _ in range(STEPS):
            loss = trainer.step()
            losses.append(loss)  # small losses
            growth.step()
        (leak,) = growth.leaks()
    assert leak.kind == "graph"
    assert line_with("small losses") in str(leak.line)
    assert leak.fix.startswith("losses.append(loss.detach())")
    assert 0 < leak.bytes_per_step < 100


def test_a_running_total_keeps_every_graph() -> None:
    trainer, total = Trainer(), 0
    with watch_growth() as growth:
        for _ in range(STEPS):
            loss = trainer.step()
            total += loss  # running total
            growth.step()
        (leak,) = growth.leaks()
    assert leak.kind == "graph"
    assert "`total`" in leak.holder
    assert line_with("running total") in str(leak.line)
    assert leak.fix.startswith("total += loss.detach()")
    assert "memory of the host" in str(leak)


def test_a_running_total_without_a_backward_pass_counts_its_bytes() -> None:
    trainer, total = Trainer(), torch.zeros(())
    with watch_growth() as growth:
        for _ in range(STEPS):
            total = total + trainer.loss()
            growth.step()
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
        for _ in range(STEPS):
            trainer.step()
            growth.step()
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
        for _ in range(STEPS):
            try:
                fails(trainer.batch()[0])
            except ValueError as error:
                errors.append(error)  # kept error
            growth.step()
        (leak,) = growth.leaks()
    assert leak.kind == "traceback"
    assert "`fails`" in leak.what
    assert "`errors`" in leak.holder
    assert "str(error)" in leak.fix
    assert leak.bytes_per_step == 2 * ROWS * 16 * 4


def test_batches_that_are_kept_in_an_attribute_a_dict_and_a_global(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The global is that of a new module: no garbage collection looks at those that were there before."""
    (tmp_path / "leaking.py").write_text("GLOBAL = []\n\ndef keep(tensor):\n    GLOBAL.append(tensor)\n")
    monkeypatch.syspath_prepend(tmp_path)
    keep = import_module("leaking").keep
    trainer, by_step = Trainer(), {}
    with watch_growth() as growth:
        for step in range(STEPS):
            trainer.history.append(torch.randn(500))
            by_step[step] = torch.randn(600)
            keep(torch.randn(700))
            growth.step()
        leaks = growth.leaks()
    assert [leak.kind for leak in leaks] == ["tensors"] * 3
    assert [leak.bytes_per_step for leak in leaks] == [2800, 2400, 2000]
    assert leaks[0].holder.startswith("list `GLOBAL`, a global of ")
    assert leaks[1].holder.startswith("dict `by_step`, a local of ")
    assert leaks[2].holder == "list `history`, an attribute of `Trainer`"
    assert "leaking.py" in str(leaks[0].line)


def test_what_a_closure_keeps_is_named_by_its_function() -> None:
    def made() -> Callable[[], None]:
        cache: list[Tensor] = []

        def remember() -> None:
            cache.append(torch.randn(1000))

        return remember

    remember = made()
    with watch_growth() as growth:
        for _ in range(STEPS):
            remember()
            growth.step()
        (leak,) = growth.leaks()
    assert leak.holder == "list `cache`, a variable that `remember` closes over"


def test_a_state_that_is_carried_on_with_its_graph_is_found() -> None:
    cell, state = nn.GRUCell(16, 16), torch.zeros(ROWS, 16)
    with watch_growth() as growth:
        for _ in range(STEPS):
            state = cell(torch.randn(ROWS, 16), state)  # carried state
            state.sum().backward(retain_graph=True)
            growth.step()
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
            for _ in range(STEPS):
                ring = [torch.randn(1000)]
                ring.append(ring)  # type: ignore[arg-type]
                growth.step()
            (leak,) = growth.leaks()
    finally:
        gc.enable()
    assert leak.kind == "cycle"
    assert "gc.collect()" in leak.fix


def healthy(work: Callable[[Growth], None]) -> tuple[Leak, ...]:
    with watch_growth() as growth:
        work(growth)
        return growth.leaks()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_state_that_appears_once_is_no_leak(kind: type[torch.optim.Optimizer]) -> None:
    trainer = Trainer()
    trainer.optimizer = kind(trainer.model.parameters(), lr=0.01)

    def work(growth: Growth) -> None:
        for _ in range(STEPS):
            loss = trainer.step()
            growth.step()
        assert loss is not None

    assert healthy(work) == ()


def test_a_log_of_numbers_is_no_leak() -> None:
    trainer, log, numbers = Trainer(), [], []

    def work(growth: Growth) -> None:
        for _ in range(STEPS):
            loss = trainer.step()
            log.append(loss.detach())
            numbers.append(loss.item())
            growth.step()

    assert healthy(work) == ()
    assert len(log) == STEPS


def test_a_window_that_is_full_is_no_leak() -> None:
    window: deque[Tensor] = deque(maxlen=6)

    def work(growth: Growth) -> None:
        for _ in range(16):
            window.append(torch.randn(1000))
            growth.step()

    assert healthy(work) == ()


def test_batches_that_grow_and_variables_that_live_on_are_no_leak() -> None:
    trainer = Trainer()

    def work(growth: Growth) -> None:
        for step in range(STEPS):
            x, y = trainer.batch(8 * (step + 1))
            output = trainer.model(x)
            F.cross_entropy(output, y).backward()
            growth.step()
        assert output.shape == (8 * STEPS, 4)

    assert healthy(work) == ()


def test_more_tensors_in_each_step_that_do_not_outlive_it_are_no_leak() -> None:
    def work(growth: Growth) -> None:
        for step in range(STEPS):
            parts = [torch.randn(1000) for _ in range(step + 1)]
            growth.step()
        assert len(parts) == STEPS

    assert healthy(work) == ()


def test_the_history_of_an_optimizer_is_its_own() -> None:
    trainer = Trainer()
    trainer.optimizer = torch.optim.LBFGS(trainer.model.parameters(), max_iter=2, history_size=100)
    x, y = trainer.batch()

    def closure() -> Tensor:
        trainer.optimizer.zero_grad()
        loss = F.cross_entropy(trainer.model(x), y)
        loss.backward()
        return loss

    def work(growth: Growth) -> None:
        for _ in range(STEPS):
            trainer.optimizer.step(closure)
            growth.step()

    assert healthy(work) == ()


def test_too_few_steps_say_nothing() -> None:
    kept = []
    with watch_growth() as growth:
        for _ in range(5):
            kept.append(torch.randn(1000))
            growth.step()
        assert growth.leaks() == ()


def test_a_watch_without_steps_says_nothing_and_live_bytes_are_told() -> None:
    with watch_growth() as growth:
        assert growth.leaks() == ()
        growth.step()
        kept = torch.zeros(1000)
        growth.step()
    before, after = growth.live
    assert after - before == kept.nbytes


def test_a_leak_goes_to_json_and_back() -> None:
    kept = []
    with watch_growth() as growth:
        for _ in range(STEPS):
            kept.append(torch.randn(1000))
            growth.step()
    (leak,) = growth.leaks()
    assert Leak.from_json(json.loads(json.dumps(leak.to_json()))) == leak
    assert str(leak).splitlines()[-1].strip().startswith("fix: ")


def test_an_error_inside_ends_the_watch() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    with pytest.raises(KeyError), watch_growth():
        raise KeyError
    assert _get_current_dispatch_mode() is None


@pytest.mark.gpu
def test_a_leak_on_a_gpu_names_its_list_and_its_line() -> None:
    trainer, losses = Trainer(Net().cuda()), []
    with watch_growth("cuda") as growth:
        for _ in range(STEPS):
            x, y = (part.cuda() for part in trainer.batch())
            losses.append(F.cross_entropy(trainer.model(x), y))
            growth.step()
        (leak,) = growth.leaks()
    assert leak.kind == "graph"
    assert "`losses`" in leak.holder
    assert leak.bytes_per_step >= ROWS * 64 * 4


@pytest.mark.gpu
def test_a_healthy_loop_on_a_gpu_has_no_leak() -> None:
    trainer = Trainer(Net().cuda())
    with watch_growth("cuda") as growth:
        for _ in range(STEPS):
            x, y = (part.cuda() for part in trainer.batch())
            trainer.optimizer.zero_grad()
            F.cross_entropy(trainer.model(x), y).backward()
            trainer.optimizer.step()
            growth.step()
        assert growth.leaks() == ()


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
        for _ in range(STEPS):
            kept.append(torch.nested.nested_tensor(rows) * 2)
            growth.step()
        (leak,) = growth.leaks()
    assert leak.bytes_per_step == 768 * 4
