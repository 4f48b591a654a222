"""Compiled objectives and blocks: compiled in the first call, or ahead of it in a thread beside the training."""

import atexit
import contextvars
import ctypes
import hashlib
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotloop._torch import (
    HERE,
    CompiledAhead,
    compiler_cache,
    compiler_kept_apart,
    has_function_modes,
    inductor,
    is_graph_break,
    leave_autocast_cache,
    map_leaves,
    stack_of,
    why_not_ahead,
)
from hotloop.errors import OutputError, PlanWarning
from hotloop.files.cache import cache_folder, make_private
from hotloop.files.whole import write_json
from hotloop.levers import repeated_blocks
from hotloop.levers.compile import (
    BlockCode,
    Varying,
    form_of,
    mark_varying,
    sizes_of,
    varying_between,
)
from hotloop.objective.objectives import Objective, autocast
from hotloop.placement.sites import OURS, Site
from hotloop.plan import Plan
from hotloop.step.inspection import signature
from hotloop.step.objectives import TrainedObjective

MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}  # the graphs are captured here, of whole steps
MOST = 4  # compilations of one objective; what varies more than that runs eagerly
TRIES = 4  # calls in which what is compiled ahead must come to be found again
# Seconds after which a compilation lets the training have the interpreter: each operation asks for it anew. With the
# usual 5 ms, steps of 4 ms that mostly wait for a device took 1.7 times as long beside a compilation, with this 1.15.
SWITCH = 0.00005
IMPORTS, CACHED_SHARE = 5.0, 0.1  # seconds to load the compiler, and the share of a compilation that is not cached
AT_EXIT = 10.0  # seconds in which a compilation must have ended when the process does


class CompiledObjective:
    """An objective compiled for batches of the form of the first one; others run eagerly.

    `varying`: dynamic dimensions of the batch's tensors. Where others turn out to vary, it is compiled once more with
    these dynamic too; not for the smaller last batch of an epoch. `form`:
    the objective was compiled ahead for batches of this form, and nothing is compiled in calls. `obstacle` says why it
    is eager.
    """

    def __init__(
        self, objective: Objective, mode: str, varying: Varying = frozenset(), *, form: Hashable = None
    ) -> None:
        self._objective = objective
        self._mode, self._varying, self._form, self._is_ahead = mode, varying, form, form is not None
        self._sizes: Any = None  # the batch whose form it is, without its numbers
        self._is_new = True  # nothing was compiled yet for what varies
        self._compilations = 0
        self.obstacle: str | None = None
        self._compiled: Objective | None = None  # with "blocks", which the model has compiled inside
        if mode in MODES:
            self._compiled = _compiled(objective, mode, varying)

    def begin_anew(self) -> None:
        """Accept batches of another form from now on, such as micro-batches of another size."""
        if not self._is_ahead:
            self._form = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if self._compiled is None or self.obstacle is not None:
            return self._objective(model, batch)
        form = form_for(batch, self._varying)
        if self._form is None:
            self._form, self._sizes = form, sizes_of(batch)
        if form is None or (form != self._form and not self._takes_any_size_of(batch)):
            return self._objective(model, batch)
        before = HERE.compiled + HERE.missed
        if self._is_ahead:
            HERE.ready = True
            try:
                returned = self._compiled(model, batch)
            finally:
                HERE.ready = False
        elif not self._is_new:
            returned = self._compiled(model, batch)
        else:
            self._is_new = False
            mark_varying(batch, self._varying)
            with warnings.catch_warnings():  # the compiler's advice is about what the levers try
                warnings.filterwarnings("ignore", module=r"torch\._inductor")
                warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
                returned = self._compiled(model, batch)
        if HERE.compiled + HERE.missed > before:
            self._count()
        return returned

    def _takes_any_size_of(self, batch: Any) -> bool:
        """Compile again with the dimensions dynamic in which this batch differs, where that is worth it."""
        if self._is_ahead or self._sizes is None:
            return False
        varying = varying_between(self._sizes, batch)
        if varying is None or not worth_compiling_for(varying - self._varying):
            return False
        self._varying |= varying
        self._form, self._is_new = form_for(self._sizes, self._varying), True
        self._compiled = _compiled(self._objective, self._mode, self._varying)
        return self._form is not None

    def _count(self) -> None:
        self._compilations += 1
        if self._compilations > MOST:
            self.obstacle = f"{MOST} compilations of the step were not enough for what varies in it"
            warnings.warn(f"the step runs eagerly from here on: {self.obstacle}", PlanWarning, stacklevel=4)


def _compiled(objective: Objective, mode: str, varying: Varying, *, fullgraph: bool = False) -> Objective:
    """`torch.compile`; Dynamo shares compiled code between calls with the same arguments."""
    dynamic = None if varying else False  # None: where it is marked; False would ignore marks
    return torch.compile(objective, backend=inductor(MODES[mode]), dynamic=dynamic, fullgraph=fullgraph)


def worth_compiling_for(varying: Varying) -> bool:
    """Whether dimensions beyond the first vary; the first does in the last batch of an epoch."""
    return any(dim for _, dim in varying)


def form_for(batch: Any, varying: Varying) -> Hashable | None:
    """The form of a batch that a compilation depends on; None where it cannot be compared."""
    form = signature(batch)
    return form if form is None or not varying else form_of(batch, varying)


@dataclass(frozen=True)
class CompilationOutcome:
    """The outcome of a compilation."""

    ready: dict[str, CompiledObjective] = field(default_factory=dict)  # by the names of the objectives
    why: str | None = None  # why nothing was made that could be used
    seconds: float = 0.0
    busy: float = 0.0  # seconds that its thread computed: what a training that never waits for a device loses at most
    graphs: int = 0  # compiled

    @property
    def is_ready(self) -> bool:
        return self.why is None


class Compilation:
    """Compiles the forward and backward pass of a plan in a thread, without running them.

    No kernel is launched, no random number is drawn, and nothing of the person's code has an effect: the compiler
    traces with the shapes of `batch`, and what it makes is held back from its first call. `poll` gives the outcome once
    it is there. `others` are batches that differ from it in sizes: one compilation holds for all sizes in between and,
    as far as the compiler can, beyond. With `compile="blocks"` the blocks are compiled for the inputs that they get in
    the next step (with `others`, in the next steps up to one in which a size differs), and are found when a plan is
    applied.
    """

    def __init__(
        self,
        objectives: Sequence[TrainedObjective],
        model: nn.Module,
        batch: Any,
        plan: Plan,
        *,
        others: Sequence[Any] = (),
    ) -> None:
        self._objectives, self._model, self._plan = tuple(objectives), model, plan
        self._key = key_of(model, batch, plan)
        self._modes = [(module, module.training) for module in model.modules()]
        self._context = contextvars.copy_context()  # settings of the compiler belong to a context
        self._began = time.monotonic()
        self._outcome: CompilationOutcome | None = None
        self._is_abandoned = False
        self._watch: _BlockWatch | None = None
        if torch.device(plan.device).type == "cuda":
            index = torch.device(plan.device).index
            self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        else:
            self._device = torch.device(plan.device)
        if has_function_modes():
            self._outcome = CompilationOutcome(
                why="a mode intercepts PyTorch's functions in steps, as a default device does"
            )
        elif plan.compile == "max-autotune":
            self._outcome = CompilationOutcome(
                why="it runs kernels to time them, on random numbers from the training's generators"
            )
        elif plan.compile == "blocks":
            self._watch = _BlockWatch(repeated_blocks(model), bool(others), self._begin_blocks)
        else:
            own = [map_leaves(_alias, each) for each in (batch, *others)]  # the marks stay off the person's tensors
            self._begin(lambda: self._compile_objectives(own))

    @property
    def seconds(self) -> float:
        """Seconds that it has run or took."""
        return time.monotonic() - self._began if self._outcome is None else self._outcome.seconds

    def poll(self) -> CompilationOutcome | None:
        """The outcome; None while it runs."""
        return self._outcome

    def abandon(self) -> None:
        """Cancel it; the thread ends at the next point where it can."""
        self._is_abandoned = True
        if self._watch is not None:
            self._watch.end()

    def _begin_blocks(self, calls: "list[_BlockCall]") -> None:
        self._began = time.monotonic()
        self._begin(lambda: self._compile_blocks(calls))

    def _begin(self, work: Callable[[], dict[str, CompiledObjective]]) -> None:
        thread = threading.Thread(target=self._context.run, args=(self._run, work), name="compilation", daemon=True)
        _RUNNING.add(thread)
        thread.start()

    def _run(self, work: Callable[[], dict[str, CompiledObjective]]) -> None:
        with suppress(_Ended):  # which may come anywhere
            self._outcome = self._worked(work)
            self._modes = []
            _RUNNING.discard(threading.current_thread())

    def _worked(self, work: Callable[[], dict[str, CompiledObjective]]) -> CompilationOutcome:
        try:
            with _beside_training():
                if why := why_not_ahead():
                    raise _Failed(why)
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                leave_autocast_cache()
                ready = work()
            outcome = CompilationOutcome(ready, None, self.seconds, time.thread_time(), HERE.compiled)
            _remember(self._key, outcome.seconds)
        except BaseException as error:  # noqa: BLE001  # nothing here may end the training
            outcome = CompilationOutcome({}, _why(error), self.seconds, time.thread_time(), HERE.compiled)
        return outcome

    def _compile_objectives(self, batches: list[Any]) -> dict[str, CompiledObjective]:
        varying = _varying(batches)
        form = form_for(batches[0], varying)
        if form is None:
            raise _Failed("the batch holds what cannot be compared from step to step")
        mode, ready = self._plan.compile, {}
        for each in self._objectives:
            function = _compiled(each.objective, mode, varying, fullgraph=True)
            for batch in batches:
                mark_varying(batch, varying)
                self._trace(function, self._model, batch)
            ready[each.name] = CompiledObjective(each.objective, mode, varying, form=form)
        return ready

    def _compile_blocks(self, calls: "list[_BlockCall]") -> dict[str, CompiledObjective]:
        if not calls:
            raise _Failed("the model repeats no block that could be compiled once")
        found: dict[BlockCode, set[Hashable]] = {}
        for call in calls:
            code = BlockCode.of(type(call.block))
            mark_varying((call.args, call.kwargs), call.varying)
            self._trace(code.trace, call.block, *call.args, **call.kwargs)
            found.setdefault(code, set()).add(call.form)
            code.varying = call.varying
        for code, forms in found.items():  # all at once: a block that finds a form runs compiled from there on
            code.forms |= forms
        return {}

    def _trace(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Compile what a call needs, until a call finds everything compiled; then calls of the training do, too."""
        for _ in range(TRIES):
            while not self._is_abandoned and any(module.training != mode for module, mode in self._modes):
                time.sleep(0.01)  # an evaluation goes on
            if self._is_abandoned:
                raise _Failed("nobody waited for it")
            if HERE.compiled > MOST:
                raise _Failed(f"{MOST} compilations are not enough for what varies in it")
            before = HERE.compiled
            try:
                with autocast(self._device, self._plan.precision):
                    function(*args, **kwargs)
            except CompiledAhead:
                if HERE.compiled == before:
                    return
            except AssertionError as error:  # a step of the training has set a flag of PyTorch, such as for TF32
                if "state changed while dynamo tracing" not in str(error):
                    raise
            else:
                raise _Failed("the compiler finds nothing to compile in it")
        raise _Failed("what the step depends on changes from call to call")


class _Failed(Exception):
    """Raised where nothing can be compiled ahead; the message is the reason."""


def _varying(batches: Sequence[Any]) -> Varying:
    """The dimensions in which batches differ."""
    found: Varying = frozenset()
    for other in batches[1:]:
        between = varying_between(batches[0], other)
        if between is None:
            raise _Failed("batches differ in more than their sizes")
        found |= between
    return found


def _why(error: BaseException) -> str:
    if isinstance(error, _Failed):
        return str(error)
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if not is_graph_break(error):
        return f"the compiler failed: {type(error).__name__}: {first}"
    stack = stack_of(error)
    inner = [frame for frame in stack if not frame.filename.startswith(OURS)] or stack
    if not inner:
        return f"the compiler breaks the graph: {first}"
    return f"the compiler breaks the graph at {Site(inner[-1].filename, inner[-1].lineno or 0)}"


# Beside the training

_RUNNING: set[threading.Thread] = set()
_LOCK = threading.Lock()
_beside: "list[tuple[Any, float]]" = []  # what is undone when the last of the threads that compile ends
_threads = 0


@contextmanager
def _beside_training() -> Iterator[None]:
    """Compile in this thread, hidden from other threads, which get the interpreter's lock soon when they ask."""
    global _threads  # noqa: PLW0603  # all of them share the process
    with _LOCK:
        if _threads == 0:
            kept = compiler_kept_apart()
            kept.__enter__()
            _beside.append((kept, sys.getswitchinterval()))
            sys.setswitchinterval(min(SWITCH, sys.getswitchinterval()))
        _threads += 1
    HERE.ahead = True
    try:
        yield
    finally:
        HERE.ahead = False
        with _LOCK:
            _threads -= 1
            if _threads == 0:
                kept, interval = _beside.pop()
                sys.setswitchinterval(interval)
                kept.__exit__(None, None, None)


class _Ended(BaseException):
    """Raised in compiling threads at the end of the process."""


@atexit.register
def _end() -> None:
    """End the threads before the interpreter exits: threads inside C++ would abort the process."""
    until, hook = time.monotonic() + AT_EXIT, sys.unraisablehook
    if any(thread.is_alive() for thread in _RUNNING):  # in a callback of a weak reference it is reported and lost
        sys.unraisablehook = lambda raised: None if raised.exc_type is _Ended else hook(raised)
    while (running := [each for each in list(_RUNNING) if each.is_alive()]) and time.monotonic() < until:
        for thread in running:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Ended))
            thread.join(0.05)


# Blocks


@dataclass
class _BlockCall:
    """One call of a block, for all calls of that form."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Hashable
    varying: Varying = frozenset()


class _BlockWatch:
    """Watches the calls of blocks in a step, and gives `done` one call for each block.

    It keeps aliases of the inputs, one for each form.
    """

    def __init__(self, blocks: Sequence[nn.Module], varies: bool, done: Callable[[list[_BlockCall]], None]) -> None:
        self._blocks, self._varies, self._done = blocks, varies, done
        self._calls: dict[int, _BlockCall] = {}
        self._forms: dict[Hashable, _BlockCall] = {}
        self._undo: list[Callable[[], object]] = []
        for block in blocks:
            self._watch(block)
        if not blocks:
            done([])

    def _watch(self, block: nn.Module) -> None:
        before, had = block.forward, "forward" in vars(block)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if block.training and torch.is_grad_enabled():
                self._see(block, args, kwargs)
            return before(*args, **kwargs)

        def undo() -> None:
            if vars(block).get("forward") is forward:
                vars(block).update(forward=before) if had else vars(block).pop("forward")

        vars(block)["forward"] = forward
        self._undo.append(undo)

    def _see(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first, extra = self._calls.get(id(block)), list[_BlockCall]()
        if first is None:
            form = form_of((args, kwargs))
            same = self._forms.get(form)
            if same is None:
                same = self._forms[form] = _call(block, args, kwargs)
            self._calls[id(block)] = _BlockCall(block, same.args, same.kwargs, form)
            if len(self._calls) < len(self._blocks) or self._varies:
                return
        elif self._varies:
            varying = varying_between((first.args, first.kwargs), (args, kwargs))
            if not varying:
                return
            extra = [_call(block, args, kwargs)]
            for call in (*self._calls.values(), *extra):
                call.varying, call.form = varying, form_of((call.args, call.kwargs), varying)
        self.end()
        calls, self._calls, self._forms = [*self._calls.values(), *extra], {}, {}
        self._done(calls)

    def end(self) -> None:
        """Restore `forward` of the blocks."""
        while self._undo:
            self._undo.pop()()


def _call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _BlockCall:
    """A call with aliases of its tensors; a tensor that is given twice is the same in both places."""
    seen: dict[int, Any] = {}
    own_args, own_kwargs = map_leaves(lambda leaf: seen.setdefault(id(leaf), _alias(leaf)), (args, kwargs))
    return _BlockCall(block, own_args, own_kwargs, form_of((args, kwargs)))


def _alias(leaf: Any) -> Any:
    """A tensor on the same memory, detached, with the same `requires_grad`."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    alias = leaf.detach()
    return alias.requires_grad_() if leaf.requires_grad else alias


# How long it takes


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of a compilation, and the evidence."""

    seconds: float
    evidence: str


def expected_seconds(model: nn.Module, mode: str, key: str | None = None) -> Estimate:
    """The expected time of a compilation; `key`, of `key_of`, finds an earlier one on this machine."""
    if key is not None and (before := _remembered(key)) is not None:
        return Estimate(before, "by the time that it took before on this machine, where PyTorch has cached it")
    blocks = repeated_blocks(model)[:1] if mode == "blocks" else []
    layers = sum(not any(True for _ in m.children()) for root in blocks or [model] for m in root.modules())
    seconds = 15.0 + 0.35 * layers
    if mode == "max-autotune":
        return Estimate(8 * seconds, "eight times that of the usual mode, as seen on an H200")
    what = "a block" if blocks else "the model"
    return Estimate(seconds, f"by the {layers} layers of {what}, as seen on an H200 with nothing cached")


def key_of(model: nn.Module, batch: Any, plan: Plan) -> str:
    """A key of what a compilation depends on: the model's class and weights, the batch, the plan."""
    weights = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    where = torch.cuda.get_device_name(plan.device) if torch.device(plan.device).type == "cuda" else plan.device
    told = (torch.__version__, where, type(model).__qualname__, weights, str(form_of(batch)))
    settings = (plan.compile, plan.precision, plan.channels_last, plan.tf32)
    return hashlib.sha256(repr((told, settings)).encode()).hexdigest()[:32]


def _remembered(key: str) -> float | None:
    """Expected seconds of a compilation that PyTorch has cached; None where it has not."""
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):  # nobody may know where home is
        told = json.loads((cache_folder("compiled") / f"{key}.json").read_text())
        if any(Path(told["folder"]).iterdir()):
            return float(told["seconds"])
    return None


def _remember(key: str, seconds: float) -> None:
    """Note that PyTorch has cached a compilation."""
    again = seconds if _remembered(key) is not None else min(seconds, IMPORTS + CACHED_SHARE * seconds)
    with suppress(OSError, OutputError, RuntimeError):  # without it, the next run takes it for a new one
        folder = cache_folder("compiled")
        make_private(folder)
        write_json(folder / f"{key}.json", {"seconds": again, "folder": compiler_cache()}, mode=0o600)
