"""`evaluate`: a model on held-out data, in inference mode, with metrics that stay on the device until the end."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from hotloop.data import Stream
from hotloop.errors import BadArgument
from hotloop.memory.oom import surely
from hotloop.memory.pieces import piece_of
from hotloop.memory.survive import Survivor
from hotloop.misfit import attempt
from hotloop.objective import Losses, Objective, Predict, autocast, averages, items_in, losses_of
from hotloop.objective import predict as predict_by_convention


class Metric(Protocol):
    """What hotloop uses of a metric of torchmetrics, whose import alone takes seconds."""

    def to(self, device: torch.device) -> Self: ...
    def reset(self) -> None: ...
    def update(self, output: Any, target: Any) -> None: ...
    def compute(self) -> Any: ...


Metrics = Mapping[str, Any]  # name → a metric of torchmetrics, or `(output, target) → tensor`


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    metrics: Metrics | None = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    objective: Objective | None = None,
    predict: Predict = predict_by_convention,
    device: str | torch.device | None = None,
    precision: str = "fp32",
    survivor: Survivor | None = None,
) -> dict[str, float]:
    """Metrics of `model` over `loader`, exact over uneven batches, with one wait for the device at the end.

    A metric is one of torchmetrics, or any `(output, target) → tensor`: a value per item, or their mean. `loss=` or
    `objective=` adds the mean loss. The model is put in eval mode and afterwards back as it was, layer by layer.
    Batches go where the model is; `device` is for a model that has neither parameters nor buffers.

    Where memory runs out, the rest of the batch is computed in smaller pieces; `survivor` remembers from one evaluation
    to the next how large they may be.

    >>> data = [(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))]
    >>> evaluate(nn.Identity(), data, {"accuracy": lambda output, target: output.argmax(1) == target})
    {'accuracy': 1.0}
    """
    if not metrics and loss is None and objective is None:
        raise BadArgument(
            "nothing to evaluate", fix='give metrics, for example {"accuracy": …}, or loss= or objective='
        )
    target_device = torch.device(device) if device is not None else _device_of(model)
    tally = _Tally(metrics or {}, loss, target_device)
    batches = Stream(loader, target_device, origins=False)  # the person's own loader, with its own workers
    survivor = survivor or Survivor([model], target_device)
    with _eval_mode(model), torch.inference_mode(), autocast(target_device, precision):
        for number, batch in enumerate(batches):
            items = items_in(batch)
            score = partial(_score, model, batch, items, tally, objective, predict)
            attempt(partial(survivor.each, items, score, tally.put), model, batch, f"evaluation batch {number}")
        return surely(tally.result, target_device)


def _score(
    model: nn.Module,
    batch: Any,
    items: int,
    tally: "_Tally",
    objective: Objective | None,
    predict: Predict,
    rows: slice,
) -> None:
    """Add some of the items of a batch to the sums."""
    tally.note()
    piece = piece_of(batch, items, rows)
    if objective is not None:
        tally.add_losses(losses_of(objective, model, piece))
    if tally.wants_output:
        tally.add(*predict(model, piece), items=rows.stop - rows.start)


class _Tally:
    """Sums on the device; nothing is read back before `result`."""

    def __init__(self, metrics: Metrics, loss: Callable[[Any, Any], Tensor] | None, device: torch.device) -> None:
        self._stateful: dict[str, Metric] = {n: m.to(device) for n, m in metrics.items() if hasattr(m, "compute")}
        for metric in self._stateful.values():
            metric.reset()
        wrong = [name for name, m in metrics.items() if name not in self._stateful and not callable(m)]
        if wrong:
            raise BadArgument(
                f"metric {wrong[0]!r} cannot be called", fix="give (output, target) → tensor, or a torchmetric"
            )
        self._means: Metrics = {name: m for name, m in metrics.items() if name not in self._stateful}
        self._loss = loss
        # float64 keeps millions of items exact; Metal has none.
        self._zero = torch.zeros((), device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
        self._sums: dict[str, tuple[Tensor, int | Tensor]] = {}  # name → (sum, number of items)
        self._before = self._sums
        self._states: list[_State] = []

    def note(self) -> None:
        """Before some items are added."""
        self._before = dict(self._sums)
        self._states = []  # none, if there is no memory to note them: nothing has changed then
        self._states = [_State(owner) for metric in self._stateful.values() for owner in _owners(metric)]

    def put(self) -> None:
        """Take back what was added since."""
        self._sums = self._before
        for state in self._states:
            state.put()

    @property
    def wants_output(self) -> bool:
        return bool(self._stateful or self._means or self._loss)

    def add(self, output: Any, target: Any, *, items: int) -> None:
        for metric in self._stateful.values():
            metric.update(output, target)
        for name, function in self._means.items():
            self._add(name, torch.as_tensor(function(output, target), device=self._zero.device), items)
        if self._loss is not None:
            value = self._loss(output, target)
            self._add("loss", value if averages(self._loss) else value / items, items)

    def add_losses(self, losses: Losses) -> None:
        self._add("loss", losses.total, losses.count)
        for name, value in losses.parts.items():
            if len(losses.parts) > 1:
                self._add(name, value, losses.count)

    def _add(self, name: str, value: Tensor, items: int | Tensor) -> None:
        """Add a mean over `items`, or values for each of them."""
        total, seen = self._sums.get(name, (self._zero, 0))
        if value.numel() > 1:
            self._sums[name] = (total + value.sum(dtype=total.dtype), seen + value.numel())
            return
        added = value.reshape(()).to(total.dtype) * items
        if isinstance(items, Tensor):
            added = torch.where(items > 0, added, 0.0)  # the mean of nothing may be NaN
        self._sums[name] = (total + added if isinstance(items, Tensor) or items else total, seen + items)

    def result(self) -> dict[str, float]:
        values: dict[str, Tensor] = {name: total / seen for name, (total, seen) in self._sums.items()}
        for name, metric in self._stateful.items():
            values |= _named(name, metric.compute())
        flat = torch.cat([v.reshape(-1).to(self._zero.dtype) for v in values.values()]).tolist()  # the one wait
        sizes = {name: v.numel() for name, v in values.items()}
        result: dict[str, float] = {}
        for name, size in sizes.items():
            own, flat = flat[:size], flat[size:]
            result |= {name: own[0]} if size == 1 else {f"{name}[{i}]": x for i, x in enumerate(own)}
        return result


class _State:
    """What a metric has gathered: the values of tensors, which an update may write to, and lists, which it adds to."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._attributes = {name: _own(value) for name, value in vars(owner).items()}
        self._copies = [(t, t.clone()) for t in self._attributes.values() if isinstance(t, Tensor)]

    def put(self) -> None:
        for tensor, values in self._copies:
            tensor.copy_(values)
        there = vars(self._owner)
        there.clear()
        there.update(self._attributes)


def _owners(metric: Any) -> Iterable[Any]:
    """What holds the state of a metric: itself, and the metrics that it is made of."""
    every = metric.modules() if isinstance(metric, nn.Module) else [metric]
    return (owner for owner in every if hasattr(owner, "compute") and hasattr(owner, "__dict__"))


def _own(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def _named(name: str, computed: Any) -> dict[str, Tensor]:
    """What a metric computed, flat: most give a tensor, some a dict of them."""
    if isinstance(computed, Mapping):
        return {f"{name}/{key}": torch.as_tensor(value) for key, value in computed.items()}
    return {name: torch.as_tensor(computed)}


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Every layer in eval mode, then each one back as it was: frozen layers stay frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _device_of(model: nn.Module) -> torch.device:
    return next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))
