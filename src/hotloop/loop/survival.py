"""Forward and backward passes that survive running out of memory: of a step, and `survive_oom` for any loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.errors import DoesNotFit
from hotloop.loop.turns import Turn
from hotloop.loop.update import Taken, Update
from hotloop.loop.window import Aside, Window
from hotloop.memory.fragmentation import Fragmented
from hotloop.memory.oom import is_recording
from hotloop.memory.pieces import bounds
from hotloop.memory.survive import Survivor
from hotloop.objective import Criterion, Losses, Objective, as_objective, autocast, averages, losses_of
from hotloop.plan import Plan, Split
from hotloop.weighing import Probe, Verdict, Weighing, check_cut

Learn = Callable[[Any, int, int | float | Tensor | None], Losses]  # (micro-batch, items, its weight) → its losses


def in_parts(weighing: Weighing, batch: Any, items: int, size: int, learn: Learn) -> Losses:
    """The losses of a batch that is learnt from in micro-batches of at most `size` items."""
    joint: Losses | None = None
    for part, count, weight in weighing.parts_of(batch, items, size):
        losses = learn(part, count, weight)
        joint = losses if joint is None else joint.with_piece(losses)
    assert joint is not None
    return joint


@contextmanager
def _alone(model: nn.Module, items: int) -> Iterator[None]:
    """Say it where a single item, to which pieces came down, is not enough for batch normalisation."""
    try:
        yield
    except ValueError as error:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        if items > 1 or not norms or "more than 1 value per channel" not in str(error):
            raise
        raise DoesNotFit(
            "two items do not fit into the memory at once, and batch normalisation cannot learn from one alone",
            fix="put those layers in eval mode or use GroupNorm; or make the items smaller",
        ) from error


class Passes:
    """Forward and backward passes of a step; one that runs out of memory is repeated in micro-batches.

    `give_way` is called before a repetition: it lets go of memory that is not needed for it.
    """

    def __init__(
        self, model: nn.Module, update: Update, survivor: Survivor | None, give_way: Callable[[], None]
    ) -> None:
        self._model, self._update, self._survivor, self._give_way = model, update, survivor, give_way
        plan = update.plan
        self._autocast = None if plan.precision == "fp32" else autocast(torch.device(plan.device), plan.precision)

    def learnt(self, turn: Turn, batch: Any, objective: Objective, *, again: bool) -> Losses:
        """The losses of a batch, whose gradients have been added to the window; `again`: it may be repeated."""
        self._update.begin(turn)
        items = self._update.weighing.items_in(batch)
        attempt = partial(self._passed, turn, batch, objective, items)
        if self._survivor is None or not again:
            return attempt(self.size_of(items))
        taken = self._update.set_aside(turn)
        try:
            losses = self._survivor.run(items, attempt, partial(self._undo, taken), batch)
        except BaseException:
            taken.put()
            raise
        taken.aside.join()
        self._survivor.portion.went_well()
        return losses

    def size_of(self, items: int) -> int:
        """How many of the items of a batch are computed at once."""
        return items if self._survivor is None else self._survivor.portion.of(items)

    def forward(self, turn: Turn, batch: Any, objective: Objective) -> None:
        """The forward passes alone that `learnt` would make."""
        items = self._update.weighing.items_in(batch)
        self._passed(turn, batch, objective, items, self.size_of(items), learns=False)

    def _undo(self, taken: Taken) -> None:
        taken.undo()
        self._give_way()

    def _passed(
        self, turn: Turn, batch: Any, objective: Objective, items: int, size: int, *, learns: bool = True
    ) -> Losses:
        """Forward and, where it `learns`, backward pass over a batch, in micro-batches of at most `size` items."""
        plan, weighing = self._update.plan, self._update.weighing
        is_cut = size < items
        if not is_cut and plan.accumulate == 1:
            with self._autocast or nullcontext():
                losses = losses_of(objective, self._model, batch, turn.name)
            if not losses.is_counted:
                losses.count = items
            if learns:
                self._update.add(turn, losses)
            return losses
        if learns:
            verdict = self._verdict(turn, batch, items, size if is_cut else None)
        else:
            verdict = weighing.known(turn.name, batch)
        form = next(bounds(items, size))[1] if is_cut else items  # only micro-batches of one size are compiled

        def learn(part: Any, count: int, weight: int | float | Tensor | None) -> Losses:
            chosen = objective if count == form else turn.objective
            with _alone(self._model, count) if is_cut else nullcontext(), self._autocast or nullcontext():
                losses = weighing.losses(verdict, turn.name, chosen, turn.objective, self._model, part, count, weight)
            if learns:
                self._update.add(turn, losses, is_part=is_cut)
            return losses

        return in_parts(weighing, batch, items, size, learn) if is_cut else learn(batch, items, None)

    def _verdict(self, turn: Turn, batch: Any, items: int, size: int | None) -> Verdict:
        """How micro-batches, or batches of a window, are weighed; another loss than the whole is refused or told."""
        plan, weighing, survivor = self._update.plan, self._update.weighing, self._survivor
        if survivor is None or is_recording():  # a trial, or a capture: what was found before holds
            return weighing.known(turn.name, batch)
        asked = None if survivor.portion.failures else plan.micro_batch
        if size is not None:
            check_cut(turn.parameters, plan.split, None, asked=asked)
        criterion = getattr(turn.objective, "criterion", None)
        modules = [self._model, *([criterion] if isinstance(criterion, nn.Module) else [])]
        probe = Probe(turn.objective, self._model, modules, survivor.device, self._autocast)
        verdict = weighing.verdict(turn.name, probe, batch, items, size)
        if size is None:
            if verdict.differs is not None:
                weighing.tell_of_difference(verdict.differs)
            weighing.tell_of_norms(self._model, "batch")
        else:
            check_cut((), plan.split, verdict.differs, asked=asked)
            if asked is not None:  # else it was said when memory ran out
                weighing.tell_of_norms(self._model, "micro-batch")
        return verdict


class Backward:
    """Forward and backward pass of a batch, in micro-batches where it does not fit; made by `survive_oom`."""

    def __init__(self, model: nn.Module, objective: Objective, criterion: Criterion | None, split: Split) -> None:
        self._model, self._objective = model, objective
        self._modules = [model, *([criterion] if isinstance(criterion, nn.Module) else [])]
        self._weighing = Weighing(split, sums=not averages(criterion))
        self._weighing.roots = lambda: {"model": model, "objective": objective}
        self._survivor: Survivor | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What gets gradients."""
        return list(dict.fromkeys(p for module in self._modules for p in module.parameters()))

    @property
    def micro_batch(self) -> int | None:
        """Items that are computed at once now; None for whole batches."""
        return None if self._survivor is None else self._survivor.portion.limit

    @property
    def failures(self) -> int:
        """Times that memory ran out so far."""
        return 0 if self._survivor is None else self._survivor.portion.failures

    @property
    def fragmented(self) -> Fragmented | None:
        """How memory lay in pieces when expandable segments were turned on; None where they were not."""
        return None if self._survivor is None else self._survivor.mended

    def __call__(self, batch: Any) -> Tensor:
        """Add the gradient of the whole batch to those that are there; its loss, detached."""
        device = next((p.device for p in self.parameters), torch.device("cpu"))
        if self._survivor is None or self._survivor.device != device:  # the model has moved
            self._survivor = Survivor(self._modules, device)
        aside = Aside(self)
        try:
            items = self._weighing.items_in(batch)
            losses = self._survivor.run(items, partial(self._attempt, batch, items, device), aside.undo, batch)
        except BaseException:
            aside.put()
            raise
        aside.join()
        self._survivor.portion.went_well()
        return losses.total

    def _attempt(self, batch: Any, items: int, device: torch.device, size: int) -> Losses:
        if size >= items:
            losses = losses_of(self._objective, self._model, batch)
            losses.total.backward()
            losses.let_go()
            return losses
        weighing, window = self._weighing, Window()
        check_cut(self.parameters, weighing.split, None, asked=None)
        probe = Probe(self._objective, self._model, self._modules, device)
        verdict = weighing.verdict("loss", probe, batch, items, size)
        check_cut((), weighing.split, verdict.differs, asked=None)
        weighing.tell_of_norms(self._model, "micro-batch")

        def learn(part: Any, count: int, weight: int | float | Tensor | None) -> Losses:
            with _alone(self._model, count):
                losses = weighing.losses(
                    verdict, "loss", self._objective, self._objective, self._model, part, count, weight
                )
            loss = window.weighed(losses)
            if loss is not None:
                loss.backward()
            losses.let_go()
            return losses

        losses = in_parts(weighing, batch, items, size, learn)
        if window.is_weighed:
            window.divide(self.parameters, device)
        return losses


def survive_oom(
    model: nn.Module, loss: Criterion | None = None, *, objective: Objective | None = None, split: Split = "auto"
) -> Backward:
    """Forward and backward pass for a loop of your own that do not die when memory runs out.

    What is returned is called with a batch that is where the model is. When memory runs out, everything that the
    attempt changed is put back (gradients, rng states, buffers) and the batch is run again in micro-batches, with the
    gradient of the whole batch: a micro-batch weighs as much as its loss is the mean over (items, targets that are not
    ignored, a mask), or as an objective says that returns `(loss, weight)`. The first cut is compared with the whole
    batch; a loss that couples its samples, as contrastive ones do, is an error and not another gradient. `split` is
    that of a `Plan`: how a batch is cut, and what is accepted. The size that fits is remembered and grows back.
    Gradients that are there are added to.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> backward = survive_oom(model, nn.MSELoss())
    >>> for batch in [(torch.ones(4, 2), torch.ones(4, 1))]:
    ...     optimizer.zero_grad()
    ...     loss = backward(batch)
    ...     optimizer.step()
    >>> backward.failures, backward.micro_batch
    (0, None)
    """
    Plan("cpu", split=split)  # which refuses what is none
    return Backward(model, as_objective(loss, objective), loss, split)
