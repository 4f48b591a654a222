"""When to tune a loop, with what, and what is remembered of it: the tuner's way from a loader to a plan."""

import hashlib
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hotloop._torch import gradient_hooks
from hotloop.cache import cache_folder, make_private, why_foreign
from hotloop.clock import synchronize
from hotloop.data.origin import check_readable_again, is_in_order
from hotloop.data.resident import Resident, generators_of, has_known_sampler, why_not_resident
from hotloop.data.rng import LoaderRng
from hotloop.effects import ReachableState, Skip, code_of_modules, look, restored_by_state
from hotloop.errors import BadArgument, OutputError, PlanWarning
from hotloop.files import write_json
from hotloop.levers import COMPILE, LEVERS, MOST_STEPS, Lever, LeverTarget, products_in_fp32, pulled_levers
from hotloop.placement import move
from hotloop.plan import Plan, Trial, Tuning
from hotloop.rng import Generator, RngStates, generators_in
from hotloop.snapshot import Snapshot
from hotloop.step.inspection import signature
from hotloop.step.objectives import TrainedObjective
from hotloop.step.training import TrainingStep
from hotloop.tune.search import Refused, Search
from hotloop.tune.trial import Material, Trials
from hotloop.version import __version__

# What a person asks for and the tuner may not change.
ASKED = ("precision", "accumulate", "clip_norm", "micro_batch", "workers", "recompute", "memory_budget", "split")
SHARE = 0.05  # of the expected run, for the trials
MOST = 10.0  # seconds of trials, compilations apart
LEAST = 0.25  # seconds; with less there is nothing to learn
LEAST_STEPS = 12  # of the plain loop that the trials must have time for
BATCHES = 8  # that the trials train on
CACHED_SHARE = 0.3  # of a compilation's time that it takes again with the compiler's own cache
FIRST, LAST = 3, 6  # steps of a run between which its pace is taken


@dataclass(frozen=True)
class Subject:
    """What is tuned."""

    model: nn.Module
    modules: Sequence[nn.Module]  # the model, and what else a step may change
    objectives: tuple[TrainedObjective, ...]
    averages: bool
    plan: Plan  # to begin with
    pinned_precision: bool
    device_name: str

    @property
    def device(self) -> torch.device:
        return torch.device(self.plan.device)

    @property
    def optimizers(self) -> list[Any]:
        return [optimizer for each in self.objectives for optimizer in each.optimizers]

    def scene(self, loader: object) -> LeverTarget:
        return LeverTarget(
            self.device,
            self.model,
            self.optimizers,
            self.pinned_precision,
            why_not_resident(loader, self.device),
            isinstance(loader, DataLoader) and loader.pin_memory,
            "deterministic algorithms are asked for" if torch.are_deterministic_algorithms_enabled() else None,
        )

    def roots(self, more: Mapping[str, object] | None = None) -> dict[str, object]:
        """From where the Python state is reached that a step may change, by the names that a person knows."""
        several = len(self.objectives) > 1
        objectives = {each.name if several else "objective": each.objective for each in self.objectives}
        optimizers = {"optimizer" if i == 0 else f"optimizer {i + 1}": o for i, o in enumerate(self.optimizers)}
        hooks = {
            f"the hooks of {name}": gradient_hooks(p) for name, p in self.model.named_parameters() if gradient_hooks(p)
        }
        return {"model": self.model, **(more or {}), **objectives, **optimizers, **hooks}

    def restorable(self) -> Skip:
        """What trials put back of all that."""
        return restored_by_state(list(self.modules))

    def key(self, batch: Any, loader: object, transform: object = None) -> str:
        """What a plan depends on, as one word: what is computed, on what, and the code that says so."""
        weights = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in self.model.named_parameters()]
        traits = [
            [f"{name}:{type(module).__qualname__}" for name, module in self.model.named_modules()],
            weights,
            repr(signature(batch)),
            [(type(o).__qualname__, _flags(o)) for o in self.optimizers],
            [self.plan.to_json(), self.pinned_precision, why_not_resident(loader, self.device) is None],
            [self.device_name, torch.__version__, __version__, products_in_fp32()],
            [code_of_modules(self.model.modules()), look(self.roots({"device_transform": transform})).code()],
        ]
        return hashlib.sha256(json.dumps(traits, default=str).encode()).hexdigest()[:32]


@dataclass
class Pace:
    """The speed of the first steps of a run, read once: it says how long the run will take."""

    device: torch.device
    seconds: float | None = None  # of a step, once it is known
    _seen: int = 0
    _start: float = 0.0

    def tick(self) -> None:
        """Before each step."""
        if self.seconds is not None:
            return
        self._seen += 1
        if self._seen == FIRST:
            synchronize(self.device)
            self._start = time.perf_counter()
        elif self._seen == LAST:
            synchronize(self.device)
            self.seconds = (time.perf_counter() - self._start) / (LAST - FIRST)


def _flags(optimizer: Any) -> list[str]:
    return [
        str({k: group.get(k) for k in ("fused", "foreach", "amsgrad", "nesterov")}) for group in optimizer.param_groups
    ]


def budget_for(seconds: float, step: float) -> float:
    """Seconds that trials may take in a run that is expected to take so many; 0 where nothing could be learnt."""
    budget = min(SHARE * seconds, MOST)
    return budget if budget >= max(LEAST, LEAST_STEPS * step) else 0.0


def material_of(loader: Any, device: torch.device, transform: Any = None, given: Any = None) -> Material:
    """What to train on in trials: `given`, a batch that was read already, or what can be read without a trace."""
    if why_not_resident(loader, device) is None and has_known_sampler(loader):
        resident = Resident(loader, device)
        before = RngStates(device, generators_held(loader, transform))
        drawn = list(islice(resident.draws(), MOST_STEPS))
        full = [each for each in drawn if _length(each) == _length(drawn[0])]
        material = Material([], loader, resident, full, transform)
        batches = [material.batch(i, resident=True) for i in range(min(BATCHES, len(full)))]
        before.restore()
        return replace(material, batches=batches)
    if given is not None:
        return Material([given])
    again = loader if is_in_order(loader) and has_known_sampler(loader) else None
    before, rng = RngStates(device, generators_held(loader, transform)), LoaderRng(loader)
    began = rng.get_state()
    check_readable_again(loader, fix="tune with a DataLoader or a list")
    first = next(iter(loader), None)
    if first is None:
        raise BadArgument("the loader gave no batch to tune with", fix="give a loader that is not empty")
    batch = move(first, device)
    material = Material([batch if transform is None else transform(batch)], again, transform=transform)
    before.restore()
    rng.set_own_state(began)
    return material


def generators_held(loader: object, transform: object) -> list[Generator]:
    """The generators that a loader, its samplers, its dataset and a transform of batches have for themselves."""
    found = [*generators_of(loader), *generators_in([getattr(loader, "dataset", None), transform])]
    return list({id(generator): generator for generator in found}.values())


def _length(drawn: Any) -> int:
    return len(drawn) if hasattr(drawn, "__len__") else 1


@dataclass(frozen=True)
class Found:
    """A plan, how it was found, and the step that was tried for it."""

    tuning: Tuning
    step: TrainingStep | None
    is_random: bool = False  # whether a plain step draws random numbers
    compile_estimate: float = 0.0  # seconds


def tune(
    subject: Subject,
    loader: Any,
    material: Material,
    *,
    steps: int | None,
    seconds: float | None,
    budget: float,
    levers: Iterable[Lever] = LEVERS,
    tell: Callable[[str], None] = lambda words: None,
    begin: Plan | None = None,
    watched: bool = False,
) -> Found:
    """Try the levers on a loop; it is left exactly as it was. `seconds` says how long the plain loop would run.

    `begin` is the plan to improve, where that is no longer the plain one. `watched`: real steps were seen to change
    nothing that trials could not restore; else the first step of the trials is watched, and is the last where it does.
    """
    started = datetime.now(UTC)
    device = subject.device
    trials = _trials_of(subject, material, watched=watched)
    plain = subject.plan
    search = Search(trials, subject.scene(loader), begin or plain, steps, budget, tell)
    if device.type == "cuda" and not _has_room(subject, device):
        return Found(nothing_tried(subject, "there is no memory for copies of the weights", steps), None)
    plain_step: float | None = None
    step = None
    is_random = False
    try:
        with trials.running(device, generators_held(loader, material.transform)):
            plain_step = trials.time(plain)
            if steps is None and seconds is not None:
                search.steps = max(1, round(seconds / plain_step))
            search.step = plain_step if begin is None else trials.pace(begin)
            best = search.run(levers)
            is_random = trials.is_random
            step = trials.step_of(best)
            if best.stream not in ("resident", "prefetched") and not best.pinned:
                plain_step = trials.alone or plain_step
                if best == plain:  # nothing was kept: one loop takes one time
                    search.step = plain_step
    except Refused as refusal:
        best = begin or plain
        search.trials = _not_tried(str(refusal))
        if trials.effects:
            warnings.warn(
                f"nothing is tuned: {refusal}; the one step that was tried has changed it", PlanWarning, stacklevel=4
            )
    if best.stream == "direct" and not any(t.lever == "resident" and t.gain is not None for t in search.trials):
        best = replace(best, stream="auto")  # which was not compared: the rule decides, as without tuning
    tuning = _tuning(subject, best, search.trials, plain_step, search.step, search.steps, started)
    return Found(tuning, step, is_random, trials.compile_estimate(COMPILE))


def gated(
    subject: Subject, loader: Any, material: Material, plan: Plan
) -> tuple[float, str | None, TrainingStep | None]:
    """A plan from elsewhere, held to a few steps of the plain loop: the seconds of it, why not, and its step."""
    start = time.perf_counter()
    why: str | None = None
    step: TrainingStep | None = None
    if subject.device.type == "cuda" and not _has_room(subject, subject.device):
        why = "there is no memory to compare it with the plain loop"
    else:
        trials = _trials_of(subject, material, watched=True)
        try:
            with trials.running(subject.device, generators_held(loader, material.transform)):
                why = trials.drift(subject.plan, plan).excess()
                step = trials.step_of(plan)
        except Refused as refusal:
            why = str(refusal)
    return time.perf_counter() - start, why, step


def _trials_of(subject: Subject, material: Material, *, watched: bool) -> Trials:
    def seen() -> ReachableState:
        return look(subject.roots({"device_transform": material.transform}), subject.restorable())

    trials = Trials(subject.model, subject.modules, subject.objectives, subject.averages, material)
    trials.seen = None if watched else seen
    return trials


def nothing_tried(subject: Subject, why: str, steps: int | None) -> Tuning:
    """The record of a loop that goes on as it is."""
    plan = replace(subject.plan, stream="auto")
    return _tuning(subject, plan, _not_tried(why), None, None, steps, datetime.now(UTC))


def _not_tried(why: str) -> list[Trial]:
    return [Trial(lever.name, lever.tier, "not tried", why) for lever in LEVERS]


def _has_room(subject: Subject, device: torch.device) -> bool:
    """Whether copies of the weights and their optimizer's state fit several times into the free memory."""
    needed = 8 * Snapshot.of(subject.modules, subject.optimizers).nbytes
    free, _ = torch.cuda.mem_get_info(device)
    return needed < free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def record(
    subject: Subject,
    plan: Plan,
    trials: Sequence[Trial],
    plain_step: float | None,
    step: float | None,
    steps: int | None,
    seconds: float,
) -> Tuning:
    """How a plan was found, with the time and place."""
    return Tuning(
        plan=plan,
        trials=tuple(trials),
        plain_step=plain_step,
        step=step,
        steps=steps,
        seconds=seconds,
        device_name=subject.device_name,
        model=type(subject.model).__name__,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), "torch": str(torch.__version__), "hotloop": __version__},
    )


def _tuning(
    subject: Subject,
    plan: Plan,
    trials: Sequence[Trial],
    plain_step: float | None,
    step: float | None,
    steps: int | None,
    started: datetime,
) -> Tuning:
    seconds = (datetime.now(UTC) - started).total_seconds()
    return record(subject, plan, trials, plain_step, step, steps, seconds)


def for_a_run_of(tuning: Tuning, seconds: float) -> Tuning:
    """A plan from the cache for a run that may be shorter: without a compilation that would not pay back in it."""
    trial = next((t for t in tuning.trials if t.lever in ("max-autotune", "compile") and t.verdict == "kept"), None)
    if trial is None or trial.gain is None or seconds * (1 - 1 / trial.gain) >= CACHED_SHARE * (trial.cost or 0.0):
        return tuning
    return replace(tuning, plan=replace(tuning.plan, compile="off"))


class Cache:
    """Plans that were found before, one file for each; what cannot be read or written is as if it were not there."""

    LARGEST = 1 << 20  # bytes of a file; what is larger is not of ours

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        with suppress(RuntimeError, ValueError, OSError):  # nobody knows where home is
            self._folder = folder or cache_folder("plans")

    def get(self, key: str, begin: Plan | None = None) -> Tuning | None:
        """The plan that is kept under a key, if it is one for a run that begins with the plan `begin`."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}.json"
        with suppress(
            OSError, ValueError, TypeError, KeyError, AttributeError, LookupError, RecursionError, MemoryError
        ):
            if path.is_file() and path.stat().st_size <= self.LARGEST and self._is_ours(path):
                tuning = Tuning.from_json(json.loads(path.read_text(encoding="utf-8")))
                return tuning if self._is_usable(tuning, begin or tuning.plan) else None
        return None

    def put(self, key: str, tuning: Tuning) -> None:
        if self._folder is not None:
            path = self._folder / f"{key}.json"
            with suppress(OutputError, OSError, ValueError):
                make_private(self._folder)
                if self._is_ours(path):
                    write_json(path, tuning.to_json(), mode=0o600)

    def _is_ours(self, path: Path) -> bool:
        why = why_foreign(path)
        if why is not None:
            warnings.warn(
                f"{why}, so plans are neither read nor kept there: set HOTLOOP_CACHE to a folder of your own, or "
                f"`chmod -R go-w {path.parent.parent}` where nobody else uses it",
                PlanWarning,
                stacklevel=2,
            )
        return why is None

    def _is_usable(self, tuning: Tuning, begin: Plan) -> bool:
        """Whether a file holds what `put` writes, and not only something that looks like it."""
        if not tuning.is_sound() or any(trial.gain is not None and trial.gain <= 0 for trial in tuning.trials):
            return False
        plan, own = tuning.plan, ("device", "accumulate", "clip_norm", "micro_batch", "workers", "recompute")
        if any(getattr(plan, name) != getattr(begin, name) for name in (*own, "memory_budget")):
            return False
        on_cuda, levers = plan.device.startswith("cuda"), pulled_levers(plan)
        known = all(lever in LEVERS and (on_cuda or not lever.needs_cuda) for lever in levers)
        return known and 0 <= plan.graph <= MOST_STEPS


def plan_of(plan: Plan | Path | str, subject: Subject, asked: dict[str, Any]) -> Plan:
    """The plan to begin with, from what a person hands in: a word, a plan, or the file of one."""
    if isinstance(plan, str) and plan in ("auto", "plain"):
        return replace(subject.plan, stream="auto" if plan == "auto" else "direct")
    if not isinstance(plan, Plan | Path | str):
        raise BadArgument(f"plan={plan!r}", fix=_PLANS)
    from_file = not isinstance(plan, Plan)
    chosen = plan if isinstance(plan, Plan) else read_plan(plan)
    here = subject.plan.device
    there = torch.device(chosen.device)
    is_here = there.type == subject.device.type and there.index in (None, subject.device.index or 0)
    if not from_file and not is_here:
        raise BadArgument(
            f"a plan for {chosen.device}, and a Loop on {here}",
            fix=f'give one of them: Plan("{here}", …), or Loop(…, plan=plan) without device=',
        )
    chosen = replace(chosen, device=here)
    unset = {"precision": "auto", "accumulate": 1, "clip_norm": None}
    for name, value in asked.items():
        if value != unset[name] and value != getattr(chosen, name):
            raise BadArgument(
                f"{name}={value!r} and a plan with {name}={getattr(chosen, name)!r}", fix="give one of them"
            )
    for lever, why in _obstacles(chosen, subject):
        if not from_file:
            raise BadArgument(f"the plan has {lever.name}: {why}", fix="leave it out of the plan")
        warnings.warn(f"{plan} has {lever.name}, which is left out here: {why}", PlanWarning, stacklevel=4)
        chosen = lever.off(chosen)
    return chosen


def possible(plan: Plan, subject: Subject) -> Plan:
    """A plan from elsewhere without what cannot work here."""
    for lever, _ in _obstacles(plan, subject):
        plan = lever.off(plan)
    return replace(plan, graph=min(plan.graph, MOST_STEPS))


def _obstacles(plan: Plan, subject: Subject) -> list[tuple[Lever, str]]:
    """The levers that a plan has pulled and that cannot work here, each with the reason."""
    scene = replace(subject.scene(None), why_not_resident=None)
    return [(lever, why) for lever in pulled_levers(plan) if (why := lever.impossible(scene, plan))]


def read_plan(path: str | Path) -> Plan:
    """The plan in a file that the tuner wrote, or in one that holds a plan alone."""
    try:
        data = json.loads(Path(path).read_text())
        return Plan.from_json(data.get("plan", data))
    except OSError as error:
        raise BadArgument(f"plan={str(path)!r} cannot be read: {error.strerror}", fix=_PLANS) from error
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        what = error.what if isinstance(error, BadArgument) else str(error)
        raise BadArgument(f"{path} holds no plan: {what}", fix="write it with `hotloop tune --out`") from error


_PLANS = 'choose "auto", "plain", a Plan, or the file of one'
