"""`ScriptLook`: notices what the rules need to know while a script trains."""

import gc
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset

from hotloop._torch import LoaderIterator, has_compiled
from hotloop.apps.doctor.seen import (
    COLLECTS,
    COPIES,
    EMPTIES,
    KEEPS_ZEROS,
    OPERATIONS,
    READS,
    SYNCHRONIZES,
    Location,
    SeenCall,
    SeenGrowth,
    SeenLine,
    SeenLoader,
    SeenOptimizer,
    SeenScript,
)
from hotloop.data import workers_for
from hotloop.data.on_device import is_constant
from hotloop.data.worker_count import bytes_in
from hotloop.device import pick
from hotloop.device.clock import synchronize
from hotloop.levers.fused import without_fused_kernel
from hotloop.placement.sites import Site, frames, is_users, is_users_file, site_of, user_site, variables
from hotloop.profiling.operation_log import LoggedOperation, OperationLog
from hotloop.scripts.training_steps import after_each, around, before_backward, before_each
from hotloop.values.tree import tensors_of

WARMUP = 3  # steps that nothing is concluded from: memory is allocated, kernels are chosen, workers start
LOGGED = WARMUP + 1  # the step of which every operation is logged
LOOK = "look"  # of an answer
FEWEST, LEAST = 4, 10  # plain steps after it; the fewest where steps are slow
LONG = 15.0  # seconds for them, in which slow ones are not made up to the least
MOST_NODES = 2000  # of a graph that are counted
LATEST = 8  # steps in which variables are watched
_READING = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__")


class ScriptLook:
    """Watches a script while it trains; `step()` says that a training step has ended.

    Calls that matter are watched all the time, which costs microseconds; one early step is logged operation by
    operation, and the pace is that of the steps after it.
    """

    def __init__(self, seconds: float, folder: Path) -> None:
        """`seconds` are those of plain steps after the logged one; `folder` is the script's."""
        self.steps = 0
        self._folder = folder
        self._seconds = seconds
        self._pace: list[float] = []  # when steps have ended, after the logged one
        self._loaders: dict[tuple[Site | None, Site | None], _Loading] = {}  # by the lines that make and read them
        self._made: WeakKeyDictionary[DataLoader[Any], tuple[Site | None, tuple[str, ...]]] = WeakKeyDictionary()
        self._iterators: WeakKeyDictionary[Any, _Loading] = WeakKeyDictionary()
        self._read_from: _Loading | None = None  # the loader of the last batch
        self._optimizers: WeakKeyDictionary[Optimizer, Site | None] = WeakKeyDictionary()  # and where they are made
        self._stepped: dict[Optimizer, Site | None] = {}  # kept: a script that has ended has let them go
        self._calls: dict[Site, SeenCall] = {}
        self._since: list[tuple[Site, bool]] = []  # calls since the last backward pass, and whether in training mode
        self._backwards: dict[Location, None] = {}
        self._counts: Counter[tuple[str, Site]] = Counter()
        self._variables = _Variables()
        self._depth = 0  # of modules that run
        self._anomaly = False
        self._log: OperationLog | None = None
        self._logging = ExitStack()
        self._device = torch.device("cpu")

    @contextmanager
    def watching(self) -> Iterator[None]:
        modules = nn.modules.module
        noticed: list[AbstractContextManager[Any]] = [
            after_each(DataLoader, "__init__", self._loader_made),
            around(DataLoader, "__iter__", self._beginning_epochs),
            around(LoaderIterator, "__next__", self._waiting),
            after_each(Optimizer, "__init__", self._optimizer_made),
            register_optimizer_step_pre_hook(self._updating),
            *(before_each(owner, "zero_grad", self._zeroing) for owner in (Optimizer, nn.Module)),
            before_backward(self._going_back),
            before_each(gc, "collect", partial(self._asked_for, COLLECTS)),
            before_each(torch.cuda, "empty_cache", partial(self._asked_for, EMPTIES)),
            before_each(torch.cuda, "synchronize", partial(self._asked_for, SYNCHRONIZES)),
            *(after_each(Tensor, name, self._copied) for name in ("to", "cuda")),
            *(before_each(Tensor, name, self._read) for name in _READING),
            modules.register_module_forward_pre_hook(self._begin_call),
            modules.register_module_forward_hook(self._end_call, always_call=True),
            self._logging,
        ]
        with ExitStack() as undo:
            for each in noticed:
                undo.enter_context(each)
            yield

    def answer(self, *, has_ended: bool) -> dict[str, Any]:
        return {LOOK: self.seen(has_ended=has_ended).to_json()}

    def step(self, device: torch.device | None) -> bool:
        """A training step has ended, on `device` if no optimizer tells; whether that is enough."""
        self.steps += 1
        if self.steps == 1:
            self._device = device or self._where()
        if self.steps <= LATEST:
            self._variables.note(sys._getframe(1))
        if self.steps == LOGGED - 1 and not has_compiled():  # while operations are logged PyTorch compiles nothing
            self._log = OperationLog(self._device, lambda: self._stepped)
            self._logging.enter_context(self._log.looking())
        if self.steps < LOGGED:
            return False
        self._logging.close()
        if self.steps == LOGGED:
            for loading in self._loaders.values():
                loading.waited = 0.0
            synchronize(self._device)
        self._pace.append(time.perf_counter())
        made = len(self._pace) - 1
        looked = self._pace[-1] - self._pace[0]
        is_enough = made >= LEAST and looked >= self._seconds
        if not is_enough and (made < FEWEST or looked < LONG):
            return False
        synchronize(self._device)
        self._pace[-1] = time.perf_counter()
        return True

    def seen(self, *, has_ended: bool) -> SeenScript:
        """What was noticed."""
        made = max(len(self._pace) - 1, 1)
        step = (self._pace[-1] - self._pace[0]) / made if self._pace else 0.0
        logged = () if self._log is None else tuple(self._log.seen)
        return SeenScript(
            device=str(self._device),
            device_name=pick(self._device).name or str(self._device),
            steps=self.steps,
            has_ended=has_ended,
            step=step,
            files=_own_files(self._folder),
            loaders=tuple(each.seen(made, step) for each in self._loaders.values() if each.trains),
            optimizers=tuple(self._seen_optimizers()),
            calls=tuple(replace(each, has_grad=each.has_grad and not each.is_trained) for each in self._calls.values()),
            backwards=tuple(self._backwards),
            lines=tuple(self._seen_lines(logged)),
            growth=tuple(self._variables.growing()),
            has_anomaly_mode=self._anomaly,
            matmuls=dict(_matmuls(logged)),
            matmul_precision=torch.get_float32_matmul_precision(),
            searches_algorithms=torch.backends.cudnn.benchmark,
        )

    def _where(self) -> torch.device:
        weights = (p for o in self._stepped for group in o.param_groups for p in group["params"])
        return next((p.device for p in weights if p.device.type != "cpu"), torch.device("cpu"))

    def _seen_optimizers(self) -> Iterator[SeenOptimizer]:
        for optimizer, made in self._stepped.items():
            name = type(optimizer).__name__
            if type(optimizer) is not getattr(torch.optim, name, None):
                obstacle: str | None = f"{name} is not PyTorch's"
            else:
                obstacle = without_fused_kernel(optimizer)
            fused = all(group.get("fused") for group in optimizer.param_groups)
            yield SeenOptimizer(_place_of(made), name, fused, obstacle)

    def _seen_lines(self, logged: Iterable[LoggedOperation]) -> Iterator[SeenLine]:
        for (what, site), times in self._counts.items():
            yield SeenLine(what, _place(site), times / max(self.steps, 1))
        made = Counter(each.site for each in logged if each.phase == "forward" and not each.by_hotloop)
        for line, times in made.items():
            if line is not None:
                yield SeenLine(OPERATIONS, _place(line), float(times))

    # What is watched

    def _loader_made(self, _: None, loader: DataLoader[Any], *args: Any, **options: Any) -> None:
        given = signature(DataLoader.__init__).bind(loader, *args, **options).arguments
        self._made[loader] = user_site(), tuple(given)

    def _beginning_epochs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def begin(loader: DataLoader[Any]) -> Any:
            (made, given), frame = self._made.get(loader, (None, ())), _user_frame()
            key = (made, None if frame is None else site_of(frame))
            if key not in self._loaders:
                self._loaders[key] = _Loading(_seen_loader(loader, made, given, frame))
            loading = self._loaders[key]
            loading.begin()
            iterator = original(loader)
            if isinstance(iterator, LoaderIterator):
                self._iterators[iterator] = loading
            return iterator

        return begin

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wait(iterator: Any) -> Any:
            loading = self._iterators.get(iterator)
            begun = time.perf_counter()
            batch = original(iterator)
            if loading is not None:
                loading.came(time.perf_counter() - begun, batch)
                self._read_from = loading
            return batch

        return wait

    def _optimizer_made(self, _: None, optimizer: Optimizer, *args: Any, **options: Any) -> None:
        self._optimizers[optimizer] = user_site()

    def _updating(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped[optimizer] = self._optimizers.get(optimizer)

    def _zeroing(self, owner: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            self._count(KEEPS_ZEROS)

    def _asked_for(self, what: str, *args: Any, **options: Any) -> None:
        caller = sys._getframe(2)
        if self.steps and is_users(caller):  # before the first step it happens once; a library has its reasons
            self._counts[what, site_of(caller)] += 1

    def _copied(self, copied: Tensor, tensor: Tensor, *args: Any, **options: Any) -> None:
        if self.steps and tensor.device.type == "cpu" and copied.device.type == "cuda":
            self._count(COPIES)

    def _read(self, tensor: Tensor, *args: Any, **options: Any) -> None:
        if self.steps and tensor.device.type == "cuda":
            self._count(READS)

    def _count(self, what: str) -> None:
        site = user_site()
        if site is not None:
            self._counts[what, site] += 1

    def _going_back(self, *args: Any, **options: Any) -> None:
        self._anomaly |= torch.is_anomaly_enabled()
        if self._read_from is not None:
            self._read_from.trains = True
        for number, (site, in_training) in enumerate(reversed(self._since)):
            if number == 0 or in_training:
                self._calls[site] = replace(self._calls[site], is_trained=True)
        self._since.clear()
        site_here = user_site()
        if site_here is not None:
            self._backwards[_place(site_here)] = None

    def _begin_call(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or torch.compiler.is_compiling():
            return
        frame = _user_frame()
        if frame is None or next(module.parameters(), None) is None:
            return
        site = site_of(frame)
        if site not in self._calls:
            self._calls[site] = _seen_call(module, args, frame)
        if not module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self._calls[site] = replace(self._calls[site], has_grad=True)
        self._since.append((site, module.training))

    def _end_call(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)


class _Loading:
    """How a loader is read."""

    def __init__(self, record: SeenLoader) -> None:
        self.trains = False
        self.waited = 0.0
        self._record = record  # without what is known at the end
        self._epochs = 0
        self._batch_bytes = 0
        self._begun: float | None = None  # when an epoch began that has no batch yet
        self._starts: list[float] = []

    def begin(self) -> None:
        self._epochs += 1
        self._begun = time.perf_counter()

    def came(self, seconds: float, batch: Any) -> None:
        self._batch_bytes = self._batch_bytes or bytes_in(batch)
        if self._begun is not None:
            seconds = time.perf_counter() - self._begun
            self._starts.append(seconds)
            self._begun = None
        self.waited += seconds

    def seen(self, steps: int, step: float) -> SeenLoader:
        later, wait = self._starts[1:], self.waited / steps
        advice = workers_for(
            None,
            workers=self._record.workers,
            batch_seconds=step,
            waited=wait / step if step else 0.0,
            step_seconds=step - wait,
            batch_bytes=self._batch_bytes,
        )
        start = sum(later) / len(later) if later else 0.0
        return replace(self._record, epochs=self._epochs, start=start, wait=wait, enough=advice.number)


def _seen_loader(
    loader: DataLoader[Any], made: Site | None, given: tuple[str, ...], frame: FrameType | None
) -> SeenLoader:
    return SeenLoader(
        made=_place_of(made),
        given=given,
        read=None if frame is None else _place(site_of(frame)),
        name="" if frame is None else _name_of(loader, frame),
        device="" if frame is None else _device_name_in(frame),
        workers=loader.num_workers,
        is_persistent=loader.persistent_workers,
        is_pinned=loader.pin_memory,
        is_constant=is_constant(loader.dataset),
        is_plain=type(loader) is DataLoader,
        is_iterable=isinstance(loader.dataset, IterableDataset),
    )


def _seen_call(module: nn.Module, args: Any, frame: FrameType) -> SeenCall:
    images = [tensor for tensor in tensors_of(args) if tensor.dim() == 4]
    convolutions = [part for part in module.modules() if type(part) is nn.Conv2d]
    weights = [part.weight for part in convolutions if part.weight.dtype == torch.float32]
    return SeenCall(
        place=_place(site_of(frame)),
        name=_name_of(module, frame),
        convolutions=len(weights) if images else 0,
        is_channels_last=all(each.is_contiguous(memory_format=torch.channels_last) for each in (*weights, *images)),
        is_autocast=torch.is_autocast_enabled(next(module.parameters()).device.type),
    )


class _Variables:
    """Variables whose graphs become longer with every step."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, str, str], list[tuple[int, int]]] = {}  # by name, file and function; with the line

    def note(self, start: FrameType | None) -> None:
        for frame in filter(is_users, frames(start)):
            for name, value in variables(frame).items():
                size = _graph_size(value)
                if size is not None:
                    key = (name, frame.f_code.co_filename, frame.f_code.co_name)
                    self._sizes.setdefault(key, []).append((size, frame.f_lineno))

    def growing(self) -> Iterator[SeenGrowth]:
        for (name, file, _), sizes in self._sizes.items():
            last = sizes[-4:]
            if len(last) == 4 and all(one < other for (one, _), (other, _) in pairwise(last)):
                yield SeenGrowth(name, file, last[-1][1])


def _graph_size(value: object) -> int | None:
    """How many nodes of a graph a tensor holds, or how many tensors with one a list does."""
    if isinstance(value, Tensor):
        return None if value.grad_fn is None else _nodes(value.grad_fn)
    if isinstance(value, list) and value and isinstance(value[-1], Tensor) and value[-1].grad_fn is not None:
        return len(value)
    return None


def _nodes(first: Any) -> int:
    seen, waiting = {first}, deque([first])
    while waiting and len(seen) < MOST_NODES:
        for node, _ in waiting.popleft().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return len(seen)


def _matmuls(logged: Iterable[LoggedOperation]) -> Counter[str]:
    flops: Counter[str] = Counter()
    for operation in logged:
        if operation.flops:
            flops[operation.precision] += int(operation.flops)
    return flops


def _user_frame() -> FrameType | None:
    """The innermost frame of the person's own code."""
    return next(filter(is_users, frames(sys._getframe(1))), None)


def _name_of(value: object, frame: FrameType) -> str:
    """What a frame calls a value, at best in the line that runs: a variable or an attribute of `self`."""
    local = variables(frame)
    known = {**frame.f_globals, **{f"self.{name}": held for name, held in _attributes(local.get("self"))}, **local}
    names = [name for name, held in known.items() if held is value]
    line = site_of(frame).code
    return next((name for name in names if re.search(rf"(?<![\w.]){re.escape(name)}\b", line)), "".join(names[:1]))


def _attributes(owner: object) -> list[tuple[str, Any]]:
    parts = owner.named_children() if isinstance(owner, nn.Module) else ()
    return [*getattr(owner, "__dict__", {}).items(), *parts]


def _device_name_in(frame: FrameType) -> str:
    """The person's word for the device, where they have one."""
    for names in (variables(frame), frame.f_globals):
        if isinstance(names.get("device"), str | torch.device):
            return "device"
    return ""


def _own_files(folder: Path) -> tuple[str, ...]:
    """Files of modules that are the person's own: in the script's folder or below it, and of no package."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    named = dict.fromkeys(file for file in files if isinstance(file, str) and file.endswith(".py"))
    return tuple(file for file in named if is_users_file(file) and _is_below(Path(file), folder))


def _is_below(file: Path, folder: Path) -> bool:
    return file.is_file() and file.resolve().is_relative_to(folder)


def _place(site: Site) -> Location:
    return Location(str(Path(site.file).resolve()), site.line)


def _place_of(site: Site | None) -> Location | None:
    return None if site is None else _place(site)
