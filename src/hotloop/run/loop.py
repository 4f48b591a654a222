"""`Loop`: the training loop a person would write by hand, on the right device, fast and hard to kill."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn

import torch
from torch import Tensor, nn

from hotloop.data import Stream, length_of
from hotloop.data.origin import check_loader, check_readable_again, nothing_came
from hotloop.device import Choice
from hotloop.errors import BadArgument, HotloopError
from hotloop.levers import levers_of
from hotloop.memory.oom import surely
from hotloop.objective.objectives import Criterion, Objective, Predict, as_objective, averages
from hotloop.objective.objectives import predict as predict_by_convention
from hotloop.placement import move, place
from hotloop.plan import Plan, Precision, Split, Tuning, precision_of
from hotloop.printing.text import an, shorten
from hotloop.records import Report
from hotloop.run.callbacks import OnEpoch, OnStep, RunHooks
from hotloop.run.core import Core
from hotloop.run.intervals import seconds_in
from hotloop.run.kernel import TrainingRun
from hotloop.run.messages import check_that_it_can_learn, refuse_unknown
from hotloop.run.part import FitArguments, Parts
from hotloop.run.parts import hooks_by_part, parts_of_run, refuse_unserved
from hotloop.run.run_ranks import Alone, ranks_and_device
from hotloop.run.schedulers import Every, Schedule, Schedulers
from hotloop.run.training_data import Transform
from hotloop.step.data_parallel import device_of, through, unwrapped
from hotloop.step.eager import total
from hotloop.step.sharding import whole
from hotloop.step.trained_objectives import Optimizers, objectives_of
from hotloop.tune.plans import ASKED, plan_of
from hotloop.tune.subject import Subject
from hotloop.values.rng import with_tensors
from hotloop.version import versions

if TYPE_CHECKING:
    from hotloop.memory.fragmentation import Fragmented
    from hotloop.metrics.evaluation import Evaluation, Metrics
    from hotloop.monitor.logs import Logged
    from hotloop.profiling.profile_record import Profile
    from hotloop.run.largest import Largest
    from hotloop.run.saving import Saver
    from hotloop.run.scores import Scored
    from hotloop.run.undone_steps import Memory


class Loop:
    """A model in training: picks the device, moves the model there once, and carries out the plan.

    `loss` is a criterion `(output, target) → loss` for batches `(input, …, target)`. `objective` is any
    `(model, batch) → loss`; it may also return a dict of named losses, which are summed. A model that returns `.loss`
    needs neither. Several optimizers follow one objective together; as dicts with the same names, each objective
    has its own optimizer and they take turns; `train_every={"generator": 5}` trains one once in five batches.
    `stateful` names what else a checkpoint shall hold, such as an `AveragedModel`: anything with `state_dict` and
    `load_state_dict`. `train_metrics` are functions `(output, target) → tensor` of the outputs that are trained on.
    `scheduler` is one of PyTorch's, or several; `{"step": …, "epoch": …}` gives each its rhythm. `micro_batch`, `split`
    and `workers` say how batches are computed in parts and loaded, as in a `Plan`, and leave all else to the tuner.

    >>> model = nn.Linear(2, 1)
    >>> loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu")
    >>> for batch in loop.batches([(torch.ones(4, 2), torch.ones(4, 1))]):
    ...     loss = loop.step(batch)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        loss: Criterion | None = None,
        *,
        objective: Objective | Mapping[str, Objective] | None = None,
        device: str | torch.device | Choice | None = None,
        precision: Precision | Literal["auto"] = "auto",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        micro_batch: int | None = None,
        split: Split = "auto",
        workers: int | None = None,
        sync_batchnorm: bool = False,
        scheduler: Schedulers = None,
        schedule: Every = "step",
        plan: Plan | Path | str = "auto",
        stateful: Mapping[str, Any] | None = None,
        train_every: Mapping[str, int] | None = None,
        train_metrics: "Metrics | None" = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, "Loop", {"loop.fit": Loop.fit, "Loop": Loop})
        # Where it trains.
        model, found = unwrapped(model)
        if device is None:
            device = plan.device if isinstance(plan, Plan) and plan.device != "auto" else device_of(found)
        if plan == "auto" and found is not None and len(found.device_ids) > 1:
            plan = "plain"  # trials would run on one of its GPUs
        ranks, choice = ranks_and_device(device)
        # What it trains.
        objective = through(found, choice.device, objective)
        self._scored = _scored(loss, train_metrics, choice.device)
        criterion = self._scored or loss
        function = objective if isinstance(objective, Mapping) else as_objective(criterion, objective)
        objectives = objectives_of(optimizer, function, train_every)
        optimizers = [each for trained in objectives for each in trained.optimizers]
        self.model = place(model, choice.device, *optimizers)
        if isinstance(loss, nn.Module):
            loss.to(choice.device)  # class weights and the like
        check_that_it_can_learn(self.model, objectives)
        # How: the plan to begin with, of what is asked for here, in the plan, and by the device.
        is_pinned = precision != "auto"
        settings: dict[str, Any] = {
            "precision": precision_of(precision) if is_pinned else "fp32",
            "accumulate": accumulate,
            "clip_norm": clip_norm,
            "clip_value": clip_value,
            "micro_batch": micro_batch,
            "split": split,
            "workers": workers,
            "sync_batchnorm": sync_batchnorm,
        }
        begin = Plan(str(choice.device), stream="direct", **settings)
        others = [criterion] if isinstance(criterion, nn.Module) else []
        subject = Subject(
            model=self.model,
            modules=[self.model, *others],
            objectives=objectives,
            averages=averages(loss),
            plan=begin,
            pinned_precision=is_pinned,
            device_name=choice.name or str(choice.device),
            on_ranks=ranks.group is not None,
        )
        pinned = ["precision"] if is_pinned else []
        asked = {key: value for key, value in settings.items() if key in pinned or value != getattr(Plan(), key)}
        begin = plan_of(plan, subject, asked)
        goals = [loss, *(objective.values() if isinstance(objective, Mapping) else [objective])]
        self.model, begin = ranks.spread(
            self.model, found, begin, optimizers, [goal for goal in goals if goal is not None]
        )
        subject = replace(
            subject,
            model=self.model,
            modules=[self.model, *others],
            plan=replace(subject.plan, **{name: getattr(begin, name) for name in ASKED}),
            pinned_precision=is_pinned or begin.precision != "fp32",
        )
        self.choice = choice  # the device, and why it was picked
        self.device, self.optimizers = subject.device, subject.optimizers
        self.objectives = subject.objectives  # each with the optimizers that follow it
        self._evaluation: Evaluation | None = None
        self._goal = loss, None if loss is not None or isinstance(function, Mapping) else function
        self._core = Core(
            subject,
            begin,
            ranks,
            criterion=loss,
            schedule=Schedule.of(scheduler, schedule, optimizers),
            stateful={} if stateful is None else _checked_stateful(stateful),
            plans_itself=plan == "auto",
            by_hand=isinstance(plan, Plan),
        )
        core = self._core
        ranks.begin(lambda: core.data.progress, lambda: core.switch.step, lambda: _weights_of(core))

    @property
    def plan(self) -> Plan:
        """The plan in use; `micro_batch` is the size of micro-batches where batches do not fit whole."""
        return self._core.switch.plan

    @property
    def epoch(self) -> int:
        """The epoch of the data, from 1 once it has begun."""
        return self._core.data.epoch

    @property
    def steps(self) -> int:
        """Updates of the weights so far."""
        return self._core.switch.step.counts.steps

    @property
    def skipped(self) -> int:
        """Updates that the fp16 scaler skipped because the gradient overflowed."""
        return self._core.switch.step.counts.skipped

    @property
    def out_of_memory(self) -> int:
        """How often memory ran out and a batch was repeated: in micro-batches, or whole where it was `fragmented`."""
        return self._core.switch.memory.portion.failures

    @property
    def fragmented(self) -> "Fragmented | None":
        """How fragmented memory was when expandable segments were turned on; None where they were not."""
        mended, evaluation = self._core.switch.memory.mended, self._evaluation
        return mended if mended is not None or evaluation is None else evaluation.memory.mended

    @property
    def tuning(self) -> Tuning | None:
        """How the plan was found; None where none was looked for."""
        return self._core.tuner.record.tuning

    @property
    def is_between_windows(self) -> bool:
        """Whether no gradient waits for its update."""
        return self._core.switch.step.is_between_windows

    def __repr__(self) -> str:
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return f"Loop({type(self.model).__name__}, {optimizers}, plan={self.plan!r}, steps={self.steps})"

    def __reduce__(self) -> NoReturn:
        raise BadArgument(
            "a Loop cannot be copied or pickled",
            fix="copy its model and build another Loop; loop.state_dict() is its state to save",
        )

    @staticmethod
    def parts() -> dict[str, tuple[str, ...]]:
        """What `fit` does besides its steps: the parts of a run in their order, and when each is called.

        A run has those that its arguments ask for. `hotloop.run.part.Part` says what each moment is.
        """
        return hooks_by_part()

    def batches(self, loader: Iterable[Any], *, device_transform: Transform | None = None) -> Iterator[Any]:
        """One epoch of `loader`, each batch already on the device. At its end a short window is updated too.

        `device_transform` changes each batch there, all of it at once: the place to normalise or augment.
        """
        core = self._core
        batches = core.data.batches(loader, device_transform)
        return core.ranks.while_telling(
            batches,
            lambda batch: core.switch.step.weighing.items_in(batch),  # noqa: PLW0108  # the step changes with the plan
        )

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and, when the window is full, update. The loss stays on the device; nothing blocks."""
        core = self._core
        data, switch = core.data, core.switch
        is_by_hand = data.given is None
        if batch is not data.given:  # what `batches` gave out is there already
            batch = surely(partial(move, batch, self.device), self.device)
        if switch.step.levers.is_displaced:
            switch.hold()
        if is_by_hand:
            data.before_step_by_hand(batch)
        if core.tuner.first.left:
            with data.giving(batch):
                return core.tuner.first.watch_step(partial(Loop.step, self, batch))  # that of a subclass is under way
        step = switch.step
        try:
            parts = step.run(batch)
        except Exception as error:
            from hotloop.objective.batch_errors import TORCH_ERRORS, explanation

            better: HotloopError | None = core.ranks.lost(error)
            if better is None and isinstance(error, TORCH_ERRORS):
                better = explanation(error, self.model, batch, data.where(), partial(core.subject.forward, batch))
            if better is None:
                raise
            raise better from error
        plan, limit = switch.noted
        if step.plan is not plan or switch.memory.portion.limit != limit or step.obstacle is not None:
            switch.note_step()
        if is_by_hand:
            core.tuner.pause()
        return next(iter(parts.values())) if len(parts) == 1 else total(parts)

    def tune(
        self,
        loader: Iterable[Any],
        *,
        steps: int | None = None,
        seconds: float | None = None,
        device_transform: Transform | None = None,
        progress: bool | None = None,
    ) -> Tuning:
        """Find the plan for a run of so many `steps`, or of so many `seconds` in plain PyTorch, and carry it out.

        The levers are tried in real steps on batches of `loader`, each against the best plan so far; one is kept where
        it is faster by more than the noise, pays back what it costs within the run, and loss and gradient stay those of
        fp32. All of these steps are undone: model, optimizers, rng state and data order are left as they were.
        `fit`, `batches` and `step` find a plan by themselves.
        """
        if (size := self._core.ranks.size) > 1:
            raise BadArgument(
                f"loop.tune on {size} ranks, each of which would find a plan of its own",
                fix="tune in one process and pass the plan: Loop(…, plan=tuning.plan); `fit` tunes all ranks together",
            )
        check_loader(loader)
        for name, value in (("steps", steps), ("seconds", seconds)):
            if value is not None and not 0 < value < math.inf:
                raise BadArgument(f"{name}={value}", fix="give a number above 0")
        if steps is None and seconds is None:
            steps = length_of(loader)
        from hotloop.run.display import telling

        with self._core.modes.within(training=True), telling("tuning", progress) as tell:
            tuning = self._core.tuner.tune(loader, device_transform, steps=steps, seconds=seconds, tell=tell)
        self._core.switch.give_back()
        return tuning

    def evaluate(
        self, loader: Iterable[Any], metrics: "Metrics | None" = None, *, predict: Predict = predict_by_convention
    ) -> dict[str, float]:
        """Metrics and the mean loss over `loader`: inference mode, eval mode and back, one sync at the end."""
        core = self._core
        if metrics is not None:
            from hotloop.metrics.evaluation import check_metrics

            check_metrics(metrics)
        loader, ranks = core.ranks.data.share_validation(loader, metrics)
        precision = core.switch.step.plan.precision
        with core.ranks.telling, core.modes.within(training=False):
            core.switch.step.share_buffers()  # a hook may evaluate in the middle of an epoch
            return self._evaluations().run(loader, metrics, *self._goal, predict, precision, ranks)

    def _evaluations(self) -> "Evaluation":
        """What evaluates the model; it remembers which size fits the memory."""
        from hotloop.metrics.evaluation import Evaluation

        if self._evaluation is None:
            self._evaluation = Evaluation(self.model, self.device, self._core.subject.plan.split)
        return self._evaluation

    def predict(
        self,
        loader: Iterable[Any],
        *,
        predict: Callable[[nn.Module, Any], Any] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """The model's outputs for every item of `loader`, in order and joined on the host: eval mode, no gradients.

        Of batches `(input, …, target)` the target is left out, of Hugging Face models the logits are taken; a dict is
        given as keywords. `predict=lambda model, batch: …` says otherwise. Tensors are joined, each part of a tuple or
        a dict; a list with an entry for each item, such as a text or a dict of boxes, becomes one of all items. Where
        memory runs out, batches are computed in parts.
        """
        from hotloop.run.display import telling

        core = self._core
        check_loader(loader)
        if length_of(loader) == 0:
            raise nothing_came(loader)
        with core.modes.within(training=False), telling("predicting", progress) as tell:
            return self._evaluations().outputs(loader, predict, core.switch.step.plan.precision, tell)

    def fit(
        self,
        loader: Iterable[Any],
        *,
        epochs: int = 1,
        validate: Iterable[Any] | None = None,
        metrics: "Metrics | None" = None,
        predict: Predict | None = None,
        device_transform: Transform | None = None,
        progress: bool | None = None,
        save: str | Path | None = None,
        every: str | float = "5min",
        keep: int = 3,
        resume: bool = False,
        time_limit: str | float | None = None,
        monitor: bool = True,
        log: "Logged" = None,
        on_step: OnStep | None = None,
        on_epoch: OnEpoch | None = None,
        best: str | tuple[str, str] = "loss",
        patience: int | None = None,
        restore_best: bool = False,
        dry_run: int | None = None,
        **unknown: Never,
    ) -> Report:
        """Train for `epochs`, evaluate after each one, and return what was measured.

        `metrics` compare outputs and targets of the batches of `validate`; where those are not `(input, …, target)` or
        a dict with "labels", `predict=lambda model, batch: (output, target)` says what they are, as in `evaluate`.

        In a terminal and in a notebook a bar shows the loss, items per second and the time left; elsewhere each epoch
        prints a line, and a long one another every 30 seconds (`progress=False`: nothing). Ctrl-C ends after the step
        that is running, with the report of what was done.

        `save` is a folder for checkpoints, written beside the training `every` so often ("30s", "5min", "1000 steps")
        and at the end; the last `keep` and the best stay. With `resume` the run goes on from the last of them, or
        begins where there is none: it ends with the weights of a run that was never stopped. Ctrl-C, SIGTERM and
        `time_limit` ("2h") save and end. `run.json` there tells what the run was begun with: arguments, plan,
        versions, commit, machine; `report.html` and `report.json` what was measured.

        With `monitor` the device is looked at twice a second, and the report tells what the run asked of it:
        utilisation, memory, energy, throttling. `log` takes these, the losses and the learning rate as they come:
        "tensorboard", "wandb", "mlflow", a path that ends in `.jsonl`, a `Log` of your own, or a list
        of these.

        `on_step` and `on_epoch` are called with a small record after each of them, and may return "stop"; nothing waits
        for the device unless a hook reads a value. `best` names the metric that says which epoch is the best, as
        "accuracy" or ("distance", "min"); that of `report.best` and of the best checkpoint. With `patience=3` the run
        ends after three epochs that were no better; with `restore_best` the model has the best epoch's weights then.

        `dry_run=3` first tries three steps of everything: training, validation, saving, hooks, logs. What fails ends it
        by name, "dry run: validation: …"; else all is undone, and a line says how long an epoch takes.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        hooks = RunHooks.of(on_step, on_epoch, best, patience, restore_best, metrics, has_scores=validate is not None)
        check_loader(loader)
        self._check(epochs, validate, metrics, device_transform, resume and save is None, unknown)
        limit = None if time_limit is None else seconds_in(time_limit)
        names = {name for name, value in given.items() if value not in (None, False)}
        names |= {"train_metrics"} if self._scored is not None else set()
        names |= {"progress"} if progress is None else set()
        refuse_unserved(names)
        core, ranks = self._core, self._core.ranks
        core.switch.step.drop_window()  # that a run left which failed in the middle of one
        loader, (validate, _) = ranks.data.share(loader), ranks.data.share_validation(validate, metrics)
        ranks.must_agree({"number of batches": length_of(loader), "number of epochs": epochs})
        with ranks.telling, _saver(save, every, keep, resume, str(hooks.goal), ranks, self.model) as saver:
            found = None if saver is None else saver.found
            if saver is not None:
                ranks.must_agree({"last checkpoint": None if found is None else found.step})
            if not ranks.is_first:
                progress, monitor, log = False, False, None
            predict = predict or predict_by_convention
            data = loader, validate, device_transform, metrics, predict
            asked = FitArguments(epochs, *data, hooks, self._scored, saver, limit, progress, monitor, log)
            if dry_run is not None:
                from hotloop.run.dry_run import try_run

                try_run(self, core, dry_run, asked)
            run = TrainingRun(self, core, epochs, length_of(loader))
            parts = parts_of_run(run, asked, names)
            try:
                core.tuner.begin()
                if found is not None:
                    from hotloop.run.display import telling

                    with telling("restoring the checkpoint", progress) as run.say:
                        parts.load(found.tree, partial(core.schedule.check_length, run))
                core.schedule.check_length(run)
                core.data.expect(run.left, one_by_one=bool(hooks.on_step))
                folder = saver.folder if saver is not None and ranks.is_first else None
                if folder is not None:
                    from hotloop.run.run_files import write_run

                    write_run(folder, given, self.plan, self.choice, ranks=ranks.size, resumed=found is not None)
                run.train(parts, partial(core.data.work, loader, device_transform))
                report = self._report(parts)
                if folder is not None:
                    from hotloop.run.run_files import write_report

                    write_report(folder, report, type(self.model).__name__)
                return report
            finally:
                parts.close()

    def _report(self, parts: Parts) -> Report:
        return Report(
            device=str(self.device),
            device_name=self.choice.name,
            reason=self.choice.reason,
            precision=self.plan.precision,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            versions=versions(),
            levers=(*levers_of(self.plan), *(["expandable segments"] if self.fragmented else [])),
            micro_batch=self.plan.micro_batch,
            **parts.report(),
        )

    def _check(
        self,
        epochs: int,
        validate: Iterable[Any] | None,
        metrics: "Metrics | None",
        device_transform: object,
        resumes_nothing: bool,
        unknown: Iterable[str],
    ) -> None:
        """Raise for arguments that cannot be meant."""
        refuse_unknown(unknown, "loop.fit", {"loop.fit": Loop.fit, "Loop": Loop})
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise BadArgument(f"epochs={epochs!r}", fix="give a whole number of at least 1")
        if metrics and validate is None:
            raise BadArgument("metrics= without validate=", fix="give the data: validate=val_loader")
        if device_transform is not None and not callable(device_transform):
            raise BadArgument(
                f"device_transform is {an(type(device_transform).__name__)}, which cannot be called",
                fix="give a function of a batch: device_transform=lambda batch: …",
            )
        if validate is not None:
            check_loader(validate, "validate=")
            if length_of(validate) == 0:
                raise nothing_came(validate, "validate=")
        if resumes_nothing:
            raise BadArgument("resume=True without save=", fix="say where the checkpoints are: save='runs/…'")
        self._core.schedule.check(metrics)

    def largest_batch(
        self,
        loader: Any,
        *,
        limit: int | None = None,
        seconds: float = 30.0,
        device_transform: Transform | None = None,
    ) -> "Largest":
        """The largest batch that fits, at most `limit` items, and the one with the best throughput.

        Real steps with batches made from the first one of `loader` (or from one batch) grow and bisect for up to
        so many `seconds`. Everything that they change is restored, to the bit.
        """
        from hotloop.run.largest import largest_batch

        self._core.switch.step.forget_captures()  # they hold memory
        with self._core.modes.within(training=True), self._core.switch.unplanned():
            subject = replace(self._core.subject, plan=self._core.switch.step.plan)
            return largest_batch(subject, loader, limit=limit, seconds=seconds, transform=device_transform)

    def memory(self, batch: Any = None) -> "Memory":
        """What is allocated, reserved and held, by what; with a `batch`, also where the memory of a step goes.

        That step is a real one: what is alive over its time, and its peak. Everything is restored afterwards. It runs
        operation by operation, so a compiled step may need less.
        """
        from hotloop.run.undone_steps import memory_of

        with self._core.modes.within(training=True), self._core.switch.unplanned():
            given = None if batch is None else move(batch, self.device)
            return memory_of(self._core.subject, self._core.switch.step.plan, given)

    def profile(
        self,
        loader: Iterable[Any],
        *,
        steps: int = 20,
        device_transform: Transform | None = None,
        progress: bool | None = None,
    ) -> "Profile":
        """Where the time of a step goes: waiting for data, copies, gaps, compute; by your own lines.

        Real steps of the plan on batches of `loader`, after a warm-up; everything is restored afterwards. `hotloop
        profile script.py` does the same for a script that knows nothing of hotloop.
        """
        from hotloop.run.display import telling
        from hotloop.run.undone_steps import profile_of

        check_readable_again(loader, fix="give what can be iterated again, such as a DataLoader")
        core, plan = self._core, self._core.switch.step.plan
        step = core.subject.step_for(plan, compiled=core.switch.step.compiled or None)
        kind = "auto" if plan.stream == "resident" and not core.switch.by_hand else plan.stream
        stream = Stream(loader, self.device, kind, device_transform, pinned=plan.pinned, workers=plan.workers)
        with core.modes.within(training=True), core.switch.unplanned(), telling("profiling", progress) as tell:
            return profile_of(core.subject, step, stream, steps, loader, tell, device_transform)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training resumes from, as plain data and tensors: model, optimizers, schedulers,
        scaler, plan, rng states, and what was given as `stateful`. `fit(save=…)` also saves where the loader is.

        As with PyTorch's own, the tensors are those of the model, not copies. Gradients that wait for their update are
        not among them.
        """
        from hotloop.run.state import LoopState

        state = LoopState(self._core).state_dict()
        state["random"] |= {"numpy": with_tensors(state["random"]["numpy"])}
        return state | {name: whole(state[name]) for name in ("model", "optimizers")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; raises where it does not fit this loop, before anything changes."""
        from hotloop.run.checks import AS_IT_WAS
        from hotloop.run.state import LoopState

        if missing := self._core.stateful.keys() - state.get("stateful", {}).keys():
            raise BadArgument(f"the state has nothing of stateful={shorten(sorted(missing))}", fix=AS_IT_WAS)
        LoopState(self._core).load_state_dict(state)
        self._core.switch.give_back()


def _checked_stateful(stateful: object) -> dict[str, Any]:
    from hotloop.run.state import checked_stateful

    return checked_stateful(stateful)


def _weights_of(core: Core) -> dict[str, Tensor]:
    from hotloop.run.state import weights_of

    return weights_of(core)


def _saver(
    folder: str | Path | None, every: str | float, keep: int, resume: bool, goal: str, ranks: Alone, model: nn.Module
) -> "AbstractContextManager[Saver | None]":
    """What writes the checkpoints of a run; None without a folder."""
    if folder is None:
        return nullcontext()
    from hotloop.run.saving import Saver

    team = ranks.team(model)
    return Saver(folder, every, keep=keep, resume=resume, team=team, goal=goal, is_first=ranks.is_first)


def _scored(loss: Criterion | None, metrics: "Metrics | None", device: torch.device) -> "Scored | None":
    """The criterion that adds up `train_metrics=`; None without them."""
    if metrics is None:
        return None
    from hotloop.run.scores import Scored

    return Scored.of(loss, metrics, device)
