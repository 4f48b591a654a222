"""`Loop`: the training loop a person would write by hand, with the device, the precision and the waits looked after."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hotloop.data import Stream, length_of, stream
from hotloop.device import pick
from hotloop.errors import BadArgument
from hotloop.evaluation import Metrics, evaluate
from hotloop.loop.fit import Fit
from hotloop.loop.update import Every, Optimizers, Schedule, Schedulers, Turn, Update, turns_of
from hotloop.loop.watch import Watch
from hotloop.misfit import REFUSALS, explanation
from hotloop.objective import Criterion, Losses, Objective, Predict, as_objective, autocast, averages, losses_of
from hotloop.objective import predict as predict_by_convention
from hotloop.placement import move, place
from hotloop.plan import Plan, Precision
from hotloop.plan import Stream as Kind
from hotloop.records import Report

Transform = Callable[[Any], Any]


class Loop:
    """A model in training: picks the device, moves the model there once, and carries out the plan.

    `loss` is a criterion `(output, target) → loss` for batches `(input, …, target)`. `objective` is any
    `(model, batch) → loss`; it may also return a dict of named losses, which are summed. A model that returns `.loss`
    needs neither. Several optimizers follow one objective together; as dicts with the same names, each objective
    has its own optimizer and they take turns.

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
        device: str | torch.device | None = None,
        precision: Precision | Literal["auto"] = "fp32",
        accumulate: int = 1,
        clip_norm: float | None = None,
        scheduler: Schedulers = None,
        schedule: Every = "step",
        plan: Literal["auto", "plain"] = "auto",
    ) -> None:
        self.choice = pick(device)
        self.device = self.choice.device
        self.plan = Plan(
            device=str(self.device),
            precision=self.choice.precision if precision == "auto" else precision,
            accumulate=accumulate,
            clip_norm=clip_norm,
            stream=_stream(plan),
        )
        self._criterion = loss
        self._objective = objective if isinstance(objective, Mapping) else as_objective(loss, objective)
        turns = turns_of(optimizer, self._objective)
        self.model = place(model, self.device, *(o for turn in turns for o in turn.optimizers))
        _check_that_it_can_learn(self.model, turns)
        self._update = Update(turns, self.plan, averages(loss))
        self._schedule = Schedule.of(scheduler, schedule)
        self._autocast = autocast(self.device, self.plan.precision)
        self._watch = Watch(self.device, single=len(turns) == 1, advice=_advice(self.plan))
        self._stream: Stream[Any] | None = None
        self._given: Any = None  # the batch that `batches` gave out last
        self.epoch = 0  # of the data, from 1 once it has begun

    @property
    def steps(self) -> int:
        """Updates of the weights so far."""
        return self._update.steps

    @property
    def skipped(self) -> int:
        """Updates that the fp16 scaler skipped because the gradient overflowed."""
        return self._update.skipped

    def batches(self, loader: Iterable[Any], *, device_transform: Transform | None = None) -> Iterator[Any]:
        """One epoch of `loader`, each batch already on the device. At its end a short window is updated too.

        `device_transform` changes each batch there, all of it at once: the place to normalise or augment.
        """
        self._stream = self._stream_of(loader)
        self.epoch += 1
        self._watch.begin_epoch()
        if not self.model.training:
            self.model.train()  # as it comes from a hub; layers that were frozen one by one stay frozen
        for batch in map(device_transform, self._stream) if device_transform else self._stream:
            self._given = batch
            yield batch
        self._given = None
        for turn in self._update.flush():
            self._schedule.after_update(turn)
        self._schedule.after_epoch()

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and, when the window is full, update. The loss stays on the device; nothing waits."""
        if batch is not self._given:  # what `batches` gave out is there already
            batch = move(batch, self.device)
        parts: dict[str, Tensor] = {}  # detached: what is watched and given back must not keep the graph
        turns = self._update.turns
        for turn in turns:
            losses = self._forward(turn, batch)
            for name, value in losses.parts.items():
                parts[name] = value.detach()
            if turn is turns[-1]:  # before the update: on a CPU a loss that is lost never reaches the weights
                self._watch.see(parts, losses.count, self.epoch, self._stream.origin if self._stream else None)
            if self._update.take(turn, losses):
                self._schedule.after_update(turn)
        return Losses(parts, 1).total

    def evaluate(
        self, loader: Iterable[Any], metrics: Metrics | None = None, *, predict: Predict = predict_by_convention
    ) -> dict[str, float]:
        """Metrics and the mean loss over `loader`: inference mode, eval mode and back, one wait at the end."""
        objective = None if self._criterion is not None or isinstance(self._objective, Mapping) else self._objective
        return evaluate(
            self.model,
            loader,
            metrics,
            loss=self._criterion,
            objective=objective,
            predict=predict,
            device=self.device,
            precision=self.plan.precision,
        )

    def fit(
        self,
        loader: Iterable[Any],
        *,
        epochs: int = 1,
        validate: Iterable[Any] | None = None,
        metrics: Metrics | None = None,
        device_transform: Transform | None = None,
        progress: bool | None = None,
    ) -> Report:
        """Train for `epochs`, evaluate after each one, and return what was measured.

        In a terminal a bar shows the loss, items per second and the time left; elsewhere each epoch prints a line
        (`progress=False`: nothing). Ctrl-C ends after the step that is running, with the report of what was done.
        """
        if epochs < 1:
            raise BadArgument(f"epochs={epochs}", fix="give a whole number of at least 1")
        batches = partial(self.batches, loader, device_transform=device_transform)
        fit = Fit(self, self._watch, self._schedule)
        return fit.run(batches, length_of(loader), epochs, validate, metrics, progress)

    def _forward(self, turn: Turn, batch: Any) -> Losses:
        try:
            with self._autocast:
                return losses_of(turn.objective, self.model, batch, turn.name)
        except REFUSALS as error:
            again = partial(turn.objective, self.model, batch)
            better = explanation(error, self.model, batch, self._where(), again)
            if better is None:
                raise
            raise better from error

    def _where(self) -> str:
        origin = self._stream.origin if self._stream else None
        if origin is None:
            return f"the batch of step {self._watch.batches + 1}"
        return f"batch {origin.number} of epoch {self.epoch}"

    def _stream_of(self, loader: Iterable[Any]) -> Stream[Any]:
        """The same stream for the same loader, so that workers which persist between epochs do."""
        if self._stream is None or self._stream.loader is not loader:
            return stream(loader, self.device, self.plan.stream)
        return self._stream


def _check_that_it_can_learn(model: nn.Module, turns: tuple[Turn, ...]) -> None:
    """Refuse a run that would change nothing: an optimizer of another model, or weights that are all frozen."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for turn in turns for parameter in turn.parameters if id(parameter) in own]
    if not held:
        raise BadArgument("the optimizer holds none of the model's parameters", fix="build it from model.parameters()")
    if not any(parameter.requires_grad for parameter in held):
        raise BadArgument(
            "every parameter that the optimizer holds is frozen", fix="set requires_grad_() on what is to learn"
        )


def _stream(plan: str) -> Kind:
    if plan not in ("auto", "plain"):
        raise BadArgument(f"plan={plan!r}", fix='choose "auto", or "plain" to turn everything off')
    return "auto" if plan == "auto" else "direct"


def _advice(plan: Plan) -> list[str]:
    """What to try when the loss is not finite."""
    advice = ["lower the learning rate"]
    if plan.clip_norm is None:
        advice.append("clip the gradient with clip_norm=1.0")
    if plan.precision == "fp16":
        advice.append('use precision="bf16" or "fp32": fp16 holds nothing above 65,504')
    return advice
