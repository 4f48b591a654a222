"""`evaluate`: a model on held-out data, in inference mode, with metrics that stay on the device until the end."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from hotloop.data import Stream
from hotloop.data.samplers import is_filler
from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument, BatchError, HotloopError, MemoryWarning
from hotloop.memory.micro_batches import check_cut, part_of
from hotloop.memory.oom import is_out_of_memory, surely
from hotloop.objective.batch_errors import TORCH_ERRORS, attempt
from hotloop.objective.comparison import PartsComparison, PartWeight, Probe, observed
from hotloop.objective.objectives import (
    Losses,
    Objective,
    Predict,
    autocast,
    averages,
    compared,
    logits_of,
    own_loss,
    shapes_in,
)
from hotloop.objective.objectives import predict as predict_by_convention
from hotloop.objective.reductions import ClassCounts, Denominators, Number
from hotloop.objective.weighing import SHAPES, Weighing
from hotloop.placement.placing import resolve
from hotloop.plan import Plan, Split
from hotloop.printing.text import an, plural
from hotloop.ranks.group import Ranks
from hotloop.step.retry import OutOfMemory, in_rows
from hotloop.step.sharding import is_sharded
from hotloop.values.snapshot import Snapshot
from hotloop.values.tree import map_tensors, tensors_in


class Metric(Protocol):
    """What hotloop uses of a metric of torchmetrics, whose import alone takes seconds."""

    def to(self, device: torch.device) -> Self: ...
    def reset(self) -> None: ...
    def update(self, output: Any, target: Any) -> None: ...
    def compute(self) -> Any: ...


ON_DEVICE = 256 * 2**20  # bytes of outputs that wait there before they are copied to the host
MOST_FRESH = 64  # numbers that wait to be added up
SMALL = 4096  # bytes that may wait with each of them
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
    split: Split = "auto",
) -> dict[str, float]:
    """Metrics of `model` over `loader`, exact over uneven batches, with one wait for the device at the end.

    A metric is one of torchmetrics, or any `(output, target) → tensor`: a value per item, of all or of those that it
    selects, their mean, or `(values, weights)`; of outputs with `.logits` it is given these. `loss=` or `objective=`
    adds the mean loss, over what the loss itself is a mean over (items, targets that are not ignored, a mask), so that
    it does not depend on the size of batches; a loss that sums is divided by the items. A loss that couples the samples
    of a batch, as contrastive ones do, is the mean of the batches' losses.

    The model is put in eval mode and afterwards back as it was, layer by layer. Batches go where the model is; `device`
    is for a model that has neither parameters nor buffers.

    Where memory runs out, the rest of the batch is computed in micro-batches; `split`, as in a `Plan`, says how they
    are cut. A loss that depends on how batches are cut is warned of.

    >>> data = [(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))]
    >>> evaluate(nn.Identity(), data, {"accuracy": lambda output, target: output.argmax(1) == target})
    {'accuracy': 1.0}
    """
    if not isinstance(model, nn.Module):
        raise BadArgument(f"the model is {an(type(model).__name__)}", fix="give a torch.nn.Module")
    if device is None:
        device = next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    precision = Plan(precision=precision).precision  # type: ignore[arg-type]  # by whichever of its names
    return Evaluation(model, resolve(device), split).run(loader, metrics, loss, objective, predict, precision)


class Evaluation:
    """Evaluations of one model; it remembers how large micro-batches may be."""

    def __init__(self, model: nn.Module, device: torch.device, split: Split = "auto") -> None:
        self.memory = OutOfMemory([model], device)
        self._model, self._device = model, device
        self._split, self._weighing = split, Weighing(split)
        self._goal: tuple[Any, Any] = (None, None)  # loss and objective of the last evaluation
        self._ways: dict[Any, Mapping[str, PartWeight]] = {}  # shapes of batches → how their losses are weighed

    def run(
        self,
        loader: Iterable[Any],
        metrics: Metrics | None,
        loss: Callable[[Any, Any], Tensor] | None,
        objective: Objective | None,
        predict: Predict,
        precision: str,
        ranks: Ranks | None = None,
    ) -> dict[str, float]:
        """What `evaluate` gives; over all `ranks`, each of which has other batches."""
        check_metrics(metrics)
        if not metrics and loss is None and objective is None:
            raise BadArgument(
                "nothing to evaluate", fix='give metrics, for example {"accuracy": …}, or loss= or objective='
            )
        if self._goal != (loss, objective):
            self._goal, self._ways = (loss, objective), {}
            is_known = type(loss).__module__ == nn.CrossEntropyLoss.__module__  # PyTorch's own losses change nothing
            roots = None if is_known else lambda: {"model": self._model, "loss": loss, "objective": objective}
            self._weighing = Weighing(self._split, sums=not averages(loss), roots=roots)
        tally = _Tally(metrics or {}, loss, self._device, self._weighing, self._ways)
        # The person's own loader, with its own workers, unless `fit` keeps a stream of it between evaluations.
        batches = loader if isinstance(loader, Stream) else Stream(loader, self._device, origins=False)
        with _eval_mode(self._model), _without_gradients(self._model), autocast(self._device, precision):
            for number, batch in enumerate(batches):
                items = self._weighing.items_in(batch)
                score = partial(_score, self._model, batch, items, tally, objective, predict, self._split)
                work = partial(in_rows, score, items, self.memory, tally.restore)
                attempt(work, self._model, batch, f"evaluation batch {number}")
                if is_filler(batches.loader, batches.origin):
                    tally.restore()  # the pass was made for the other ranks alone
            return surely(partial(tally.result, ranks), self._device)

    def outputs(
        self,
        loader: Iterable[Any],
        predict: Callable[[nn.Module, Any], Any] | None,
        precision: str,
        tell: Callable[[str], None],
    ) -> Any:
        """What the model gives for every item, in order, joined on the host."""
        call = predict or _output_by_convention
        written = "model(…)"
        pieces: list[Any] = []  # on the host
        waiting: list[Any] = []  # on the device
        size = done = 0  # bytes that wait, items
        with _eval_mode(self._model), _without_gradients(self._model), autocast(self._device, precision):
            for number, batch in enumerate(Stream(loader, self._device, origins=False)):
                items = self._weighing.items_in(batch)
                written = _written(batch) if predict is None else written
                found: list[Any] = []
                some = partial(_add_output, found, self._model, batch, items, call, self._split)
                work = partial(in_rows, some, items, self.memory)
                attempt(work, self._model, batch, f"batch {number}")
                waiting += found
                done += items
                size += sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_in(found))
                if size > ON_DEVICE:
                    pieces.append(_on_host(waiting, written))
                    waiting, size = [], 0
                tell(plural(done, "item"))
            if waiting:
                pieces.append(_on_host(waiting, written))
        # What was joined here is an ordinary tensor; an inference tensor could not be trained on.
        return map_tensors(_joined(pieces, written), lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


def _output_by_convention(model: nn.Module, batch: Any) -> Any:
    """The output for a batch `(input, …, target)`, a dict, or an input alone; of Hugging Face models, the logits."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*(batch[:-1] if len(batch) > 1 else batch))
    else:
        output = model(batch)
    return logits_of(output)


def _add_output(
    found: list[Any],
    model: nn.Module,
    batch: Any,
    items: int,
    call: Callable[[nn.Module, Any], Any],
    split: Split,
    rows: slice,
) -> None:
    part, _ = part_of(batch, items, rows, split)
    output, count = call(model, part), rows.stop - rows.start
    found.append(_PerItem(output) if _is_per_item(output, count) else output)


class _PerItem(list[Any]):
    """Outputs of which each item has one, such as a text, or the boxes in an image."""


def _is_per_item(output: Any, items: int) -> bool:
    """Whether a list has an entry for each item, and not a tensor for each of several outputs."""
    if type(output) is not list or len(output) != items:
        return False
    return not all(isinstance(each, Tensor) and each.dim() and len(each) == items for each in output)


def _written(batch: Any) -> str:
    """How a person calls the model with such a batch."""
    if isinstance(batch, Mapping):
        return "model(**batch)"
    return "model(batch[0])" if isinstance(batch, list | tuple) else "model(batch)"


def _on_host(outputs: list[Any], written: str) -> Any:
    """Outputs of several batches as one, on the host."""
    return map_tensors(_joined(outputs, written), torch.Tensor.cpu)


def _joined(outputs: list[Any], written: str, path: str = "the output") -> Any:
    """Outputs one after the other: tensors as one tensor, of tuples and dicts each part, of items their list."""
    first = outputs[0]
    if isinstance(first, _PerItem):
        return _PerItem(item for each in outputs for item in each)
    if isinstance(first, Tensor):
        try:
            return torch.cat([each.unsqueeze(0) if each.dim() == 0 else each for each in outputs])
        except RuntimeError as error:
            raise _ragged(outputs, written, path) or error from error
    if isinstance(first, Mapping):
        _check_alike(path, written, [sorted(map(str, each)) for each in outputs])
        return {key: _joined([each[key] for each in outputs], written, f"{path}[{key!r}]") for key in first}
    if isinstance(first, list | tuple):
        _check_alike(path, written, [len(each) for each in outputs])
        return tuple(_joined([each[i] for each in outputs], written, f"{path}[{i}]") for i in range(len(first)))
    raise BadArgument(
        f"{path} is {an(type(first).__name__)}, which cannot be joined",
        fix=f"say which tensors are wanted: predict=lambda model, batch: {written}.…",
    )


def _check_alike(path: str, written: str, parts: list[Any]) -> None:
    """Refuse outputs that have other parts in another batch."""
    if others := [each for each in parts if each != parts[0]]:
        raise BadArgument(
            f"{path} has the parts {parts[0]} in one batch and {others[0]} in another, which cannot be joined",
            fix=f"say which tensors are wanted: predict=lambda model, batch: {written}.…",
        )


def _ragged(outputs: list[Tensor], written: str, path: str) -> BadArgument | None:
    """The error to raise for tensors whose shapes differ from batch to batch; None where that is not what is wrong."""
    shapes = dict.fromkeys(tuple(each.shape) for each in outputs if not each.is_nested)
    rest = list({shape[1:]: shape for shape in shapes}.values())
    if len(rest) < 2:
        return None
    whole = ".logits" if "**" in written else ""  # what is taken of models that are called so
    return BadArgument(
        f"{path} has the shape {rest[0]} in one batch and {rest[1]} in another, which cannot be joined",
        fix='pad it to one length, or make a dict for each item: predict=lambda model, batch: [{"output": row} for row'
        f" in {written}{path.removeprefix('the output') or whole}]",
    )


def check_metrics(metrics: Metrics | None) -> None:
    """Refuse metrics without names, with the name of the loss, and what cannot be called."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        whole = isinstance(metrics, nn.ModuleDict)  # a MetricCollection of torchmetrics, whose metrics have names
        fix = 'give it a name: metrics={"all": collection}' if whole else 'give names: metrics={"accuracy": accuracy}'
        raise BadArgument(f"metrics is {an(type(metrics).__name__)}", fix=fix)
    if "loss" in metrics:
        raise BadArgument("a metric is called 'loss', as the loss itself is", fix="give the metric another name")
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise BadArgument(
                f"metric {name!r} is the class {metric.__name__}", fix=f"create an instance: {metric.__name__}(…)"
            )
        missing = [method for method in ("to", "reset", "update") if not hasattr(metric, method)]
        if hasattr(metric, "compute") and missing:
            raise BadArgument(
                f"metric {name!r} has compute and no {' and no '.join(missing)}",
                fix="give (output, target) → tensor, or a metric with to, reset, update and compute",
            )
        if not hasattr(metric, "compute") and not callable(metric):
            raise BadArgument(
                f"metric {name!r} cannot be called", fix="give (output, target) → tensor, or a torchmetric"
            )


def _score(
    model: nn.Module,
    batch: Any,
    items: int,
    tally: "_Tally",
    objective: Objective | None,
    predict: Predict,
    split: Split,
    rows: slice,
) -> None:
    """Add some of the items of a batch to the sums."""
    tally.take()
    count = rows.stop - rows.start
    if count < items and split == "off":
        check_cut((), split, None, asked=None)
    (part, _) = part_of(batch, items, rows, split)
    if count < items and tally.is_to_compare and split != "items":
        tally.compare(model, part, count, objective, predict, split)
    outputs: list[Any] = []
    calls_alike = objective is own_loss and predict is predict_by_convention
    if calls_alike and isinstance(part, Mapping) and "labels" in part and tally.wants_output:
        objective = partial(own_loss, keep=outputs.append)  # metrics are of the same pass
    if objective is not None:
        tally.add_losses(part, count, shapes_in(part), objective, model)
    if tally.wants_output:
        pair = (outputs[0], part["labels"]) if outputs else predict(model, part)
        tally.add(*pair, items=count)


class _Share(NamedTuple):
    """What a batch adds to a mean."""

    name: str
    value: Tensor  # a single number
    times: Number  # that it is added
    seen: Number  # what it adds to what the sum is divided by


class _Sums:
    """Sums of means on the device, exact, added up several at a time; nothing is read back."""

    def __init__(self, device: torch.device) -> None:
        # float64 keeps millions of items exact.
        self.zero = torch.zeros((), device=device, dtype=backend_of(device).widest_float)
        self.left_out = torch.zeros((), device=device, dtype=torch.bool)  # whether a loss was, in which nothing counts
        self._sums: dict[str, tuple[Tensor, Number]] = {}  # name → (sum, what it is divided by)
        self._fresh: list[_Share] = []  # not in the sums yet: added up together, which takes few operations
        self._noted = 0  # of these, those of earlier batches

    def take(self) -> None:
        """Before a batch is added."""
        self._noted = len(self._fresh)  # before memory can run out below
        if self._noted >= MOST_FRESH:
            self._add_up()

    def restore(self) -> None:
        """Take back what was added since."""
        del self._fresh[self._noted :]

    def add(self, name: str, value: Tensor, items: Number) -> None:
        """Add a mean over `items`."""
        value = value.reshape(()) if value.dim() else value
        if type(value) is Tensor and value.untyped_storage().nbytes() > SMALL:
            value = value.clone()  # an entry of a large tensor, which would wait with it
        self._fresh.append(_Share(name, value, items, items))

    def add_values(self, name: str, values: Tensor) -> None:
        """Add a value of each of several items."""
        self._fresh.append(_Share(name, values.sum(dtype=self.zero.dtype), 1, values.numel()))

    def add_weighted(self, name: str, values: Tensor, weights: Tensor) -> None:
        exact = self.zero.dtype
        self._fresh.append(_Share(name, (values * weights).sum(dtype=exact), 1, weights.sum(dtype=exact)))

    def means(self) -> dict[str, Tensor]:
        self._add_up()
        return {name: total / seen for name, (total, seen) in self._sums.items()}

    def share(self, ranks: Ranks, parts: Sequence[str]) -> list[Sequence[str]]:
        """Make the sums those of all ranks, of which some may have had no batch; the `parts` of each rank."""
        self._add_up()
        mine = {name: (float(total), float(seen)) for name, (total, seen) in self._sums.items()}
        every = ranks.gather([mine, parts])
        names = dict.fromkeys(name for each, _ in every for name in each)
        pairs = {name: [each[name] for each, _ in every if name in each] for name in names}
        self._sums = {
            name: (self.zero + sum(total for total, _ in found), sum(seen for _, seen in found))
            for name, found in pairs.items()
        }
        return [theirs for _, theirs in every]

    def _add_up(self) -> None:
        """Add to the sums what has come since the last time: all of it, or nothing where memory runs out."""
        sums = dict(self._sums)
        by_name: dict[str, list[_Share]] = {}
        for share in self._fresh:
            by_name.setdefault(share.name, []).append(share)
        for name, shares in by_name.items():
            total, seen = sums.get(name, (self.zero, 0))
            alike: dict[int | float, list[Tensor]] = {}
            for share in shares:
                if not isinstance(share.times, Tensor) and share.times:  # the mean of nothing may be NaN
                    alike.setdefault(share.times, []).append(share.value)
            for times, values in alike.items():
                total = total + self._stacked(values).sum() * times
            if pairs := [(share.value, share.times) for share in shares if isinstance(share.times, Tensor)]:
                means, counts = map(self._stacked, zip(*pairs, strict=True))
                total = total + torch.where(counts > 0, means * counts, 0.0).sum()
                self.left_out = self.left_out | ((counts == 0) & (means.abs() > 0)).any()  # not of nan, which is 0/0
            seen = seen + sum(share.seen for share in shares if not isinstance(share.seen, Tensor))
            if counted := [share.seen for share in shares if isinstance(share.seen, Tensor)]:
                seen = seen + self._stacked(counted).sum()
            sums[name] = (total, seen)
        self._sums, self._fresh, self._noted = sums, [], 0

    def _stacked(self, numbers: Sequence[Tensor]) -> Tensor:
        """Single numbers in one tensor, exact."""
        if len({number.dtype for number in numbers}) > 1:
            numbers = [number.to(self.zero.dtype) for number in numbers]
        return torch.stack(list(numbers)).to(self.zero.dtype)


class _Tally:
    """Metrics and losses of an evaluation; nothing is read back before `result`."""

    def __init__(
        self,
        metrics: Metrics,
        loss: Callable[[Any, Any], Tensor] | None,
        device: torch.device,
        weighing: Weighing,
        ways: dict[Any, Mapping[str, PartWeight]],
    ) -> None:
        self._stateful: dict[str, Metric] = {n: m.to(device) for n, m in metrics.items() if hasattr(m, "compute")}
        for metric in self._stateful.values():
            metric.reset()
        self._means: Metrics = {name: m for name, m in metrics.items() if name not in self._stateful}
        self._loss, self._compare = loss, None if loss is None else compared(loss)
        self._device, self._sums = device, _Sums(device)
        self._several: set[str] = set()  # metrics that gave more values than one, or none: one is not a mean then
        self._parts: tuple[str, ...] = ()  # names of losses of which there are several
        self._gathered = Snapshot()  # what metrics hold
        self._weighing, self._ways = weighing, ways
        self._untold: list[tuple[Losses, Denominators, int]] = []  # a later batch tells their weights
        self._noted_untold = 0
        self._nothing = nn.Module()  # the model of a criterion
        self.is_to_compare = True  # whether the first cut is still to come

    def compare(
        self, model: nn.Module, part: Any, items: int, objective: Objective | None, predict: Predict, split: Split
    ) -> None:
        """At the first cut: warn where the loss depends on how a batch is cut."""
        self.is_to_compare = False
        loss = self._loss
        if objective is None and loss is not None:

            def objective(model: nn.Module, batch: Any) -> Tensor:
                output, target = predict(model, batch)
                return loss(logits_of(output), target)

        if objective is None or items < 2:
            return
        probe = Probe(objective, model, [model], self._device, learns=False)
        found = probe.compared(part, items, max(items // 3, 1), split)
        verdict = found.verdict(sums=not averages(loss)) if isinstance(found, PartsComparison) else found
        if verdict is not None and verdict.differs is not None:
            warnings.warn(
                f"memory ran out in an evaluation, and {verdict.differs}: what is reported depends on the memory. fix:"
                " use smaller batches, all of which fit",
                MemoryWarning,
                stacklevel=2,
            )

    def take(self) -> None:
        """Before some items are added."""
        self._noted_untold = len(self._untold)
        self._sums.take()
        if not self._stateful:
            return
        self._gathered = Snapshot()  # of nothing, if there is no memory to note it: nothing has changed then
        owners = [owner for metric in self._stateful.values() for owner in _owners(metric)]
        held = [value for owner in owners for value in vars(owner).values()]
        lists = [value for value in held if type(value) in (list, dict)]
        tensors = [value for value in held if isinstance(value, Tensor)]
        self._gathered = Snapshot().items([*map(vars, owners), *lists]).values(tensors)

    def restore(self) -> None:
        """Take back what was added since."""
        self._sums.restore()
        del self._untold[self._noted_untold :]
        self._gathered.restore()

    @property
    def wants_output(self) -> bool:
        return bool(self._stateful or self._means or self._loss)

    def add(self, output: Any, target: Any, *, items: int) -> None:
        for name, metric in self._stateful.items():
            try:
                metric.update(logits_of(output), target)
            except TORCH_ERRORS as error:
                if isinstance(error, HotloopError | AttributeError) or is_out_of_memory(error):
                    raise
                raise _refused(name, metric, logits_of(output), target, error) from error
        for name, function in self._means.items():
            value = function(logits_of(output), target)
            try:  # a tuple is (values, weights), as of training metrics
                if isinstance(value, tuple):
                    values, weights = map(torch.as_tensor, value)
                else:
                    values = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError) as error:  # whatever torch raises for what is no number
                raise BadArgument(
                    f"metric {name!r} returned {an(type(value).__name__)}",
                    fix="return a tensor with a value for each item, their mean, or (values, weights)",
                ) from error
            if isinstance(value, tuple):
                self._sums.add_weighted(name, values.to(self._device), weights.to(self._device))
            else:
                self._add_values(name, values.to(self._device), items)
        if self._compare is not None:
            output, compare = logits_of(output), self._compare
            are_tensors = isinstance(output, Tensor) and isinstance(target, Tensor)  # else they may hide what decides
            key = ("loss", output.shape, target.shape) if are_tensors else None
            self.add_losses((output, target), items, key, lambda _, pair: compare(*pair), self._nothing)

    def add_losses(self, batch: Any, items: int, key: Any, objective: Objective, model: nn.Module) -> None:
        """Add the losses of a batch, weighed as those of the same `key`, not None, were, or as a comparison shows."""
        ways = None if key is None else self._ways.get(key)
        if ways is not None:
            counters = [way.counter() for way in ways.values()]
            counts = counters[0] if len({*map(type, counters)}) == 1 else Denominators()
            losses = observed(objective, objective, model, batch, counts)
        else:
            counts = every = Denominators()
            with self._weighing.looked_at(model):
                losses = observed(objective, objective, model, batch, every)
            probe = Probe(objective, model, [model], self._device, learns=False)
            last = next(reversed(self._ways.values()), {})
            known = probe if len(self._ways) < SHAPES else None
            ways = self._weighing.ways(losses, every, batch, items, known, last)
            every.forget()
            if ways is None:
                self._untold.append((losses, every, items))
                return
            self._ways[key] = ways
        self._add_weighed(losses, counts, items, ways)

    def _add_weighed(
        self, losses: Losses, counts: Denominators | ClassCounts | None, items: int, ways: Mapping[str, PartWeight]
    ) -> None:
        several = len(losses.parts) > 1
        for name, value in losses.parts.items():
            kept, way = name if several else "loss", ways[name]
            if losses.is_counted:
                self._sums.add(kept, value, losses.count)
            elif way.kind == "count":
                count = counts.value_at(way.place) if counts is not None else None
                self._sums.add(kept, value, 0 if count is None else count)
            else:
                self._sums.add(kept, value / items if way.kind == "sum" else value, items * way.ratio)
        if several:
            self._parts = tuple(losses.parts)
            if taken := {*self._parts} & {*self._means, *self._stateful}:
                raise BadArgument(
                    f"a metric is called {min(taken)!r}, as one of the losses is", fix="give the metric another name"
                )

    def _add_values(self, name: str, values: Tensor, items: int) -> None:
        """Add what a metric gave: values of some of the items, or their mean, which may have a dimension too."""
        if values.dim() and values.numel() != 1:
            self._several.add(name)
        if values.dim() and name in self._several:
            self._sums.add_values(name, values)
        else:
            self._sums.add(name, values, items)

    def result(self, ranks: Ranks | None = None) -> dict[str, float]:
        last = next(reversed(self._ways.values()), None)
        for losses, counts, items in self._untold:
            ways = last or self._weighing.ways(losses, counts, None, items, None, {})
            assert ways is not None
            self._add_weighed(losses, counts, items, ways)
        if ranks is not None:
            self._parts = next((tuple(parts) for parts in self._sums.share(ranks, list(self._parts)) if parts), ())
            for metric in self._stateful.values():
                if getattr(metric, "process_group", self) is None:  # torchmetrics add up themselves
                    metric.process_group = ranks.group  # type: ignore[attr-defined]
        values = self._sums.means()
        if self._parts:  # each is the mean over something of its own
            values = {"loss": torch.stack([values[name] for name in self._parts]).sum(), **values}
        for name, metric in self._stateful.items():
            values |= _named(name, metric.compute())
        every = [*values.values(), self._sums.left_out]
        *flat, left_out = torch.cat([v.reshape(-1).to(self._sums.zero.dtype) for v in every]).tolist()  # the one wait
        if left_out:
            self._weighing.tell("empty")
        sizes = {name: v.numel() for name, v in values.items()}
        result: dict[str, float] = {}
        for name, size in sizes.items():
            own, flat = flat[:size], flat[size:]
            result |= {name: own[0]} if size == 1 else {f"{name}[{i}]": x for i, x in enumerate(own)}
        return result


def _refused(name: str, metric: Metric, output: Any, target: Any, error: Exception) -> BatchError:
    """The error to raise for what a metric of torchmetrics raised."""
    given = [
        f"{kind} of shape {tuple(each.shape)}"
        if isinstance(each, Tensor)
        else f"{kind} that is {an(type(each).__name__)}"
        for kind, each in (("an output", output), ("a target", target))
    ]
    change = "…"
    if isinstance(output, Tensor) and isinstance(target, Tensor):
        if output.shape == (*target.shape, 1):
            change = "output.squeeze(-1)"
        elif output.shape[:-1] == target.shape:  # as Hugging Face models of tokens give them
            change = "output.movedim(-1, 1)"
    return BatchError(
        f"metric {name!r}, {type(metric).__name__}, refuses {' and '.join(given)}: {error}",
        fix=f"change them in a class of your own: def update(self, output, target): super().update({change}, target)",
    )


def _owners(metric: Any) -> Iterable[Any]:
    """What holds the state of a metric: itself, and the metrics that it is made of."""
    every = metric.modules() if isinstance(metric, nn.Module) else [metric]
    return (owner for owner in every if hasattr(owner, "compute") and hasattr(owner, "__dict__"))


def _named(name: str, computed: Any) -> dict[str, Tensor]:
    """What a metric computed, flat: most give a tensor, some a dict of them."""
    if isinstance(computed, Mapping):
        return {key: each for part, value in computed.items() for key, each in _named(f"{name}/{part}", value).items()}
    try:
        return {name: torch.as_tensor(computed)}
    except (TypeError, ValueError, RuntimeError) as error:  # whatever torch raises for what is no number
        raise BadArgument(
            f"metric {name!r} computed {an(type(computed).__name__)} that is not made of single numbers",
            fix="give one that computes a number or a tensor; for a curve, loop.predict gives the outputs to compute it"
            " from",
        ) from error


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Every layer in eval mode, then each one back as it was: frozen layers stay frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # parents first
            if module.training != mode:
                module.train(mode)  # not the flag alone: LoRA's layers merge their weights there and take them out
        for module, mode in modes:
            module.training = mode  # where a second parent or an override of `train` has changed it


def _without_gradients(model: nn.Module) -> AbstractContextManager[Any]:
    """Inference mode, or where that does not work no_grad."""
    # FSDP keeps tensors of its first pass, which a training step could not use if they were inference tensors, and a
    # scripted module that has trained computes them with what was compiled for training, which refuses them.
    is_scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    return torch.no_grad() if is_scripted or is_sharded(model) else torch.inference_mode()
