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
from hotloop.memory.pieces import bounds, contents, pieces_of, restore
from hotloop.memory.survive import Survivor
from hotloop.objective import Criterion, Losses, Objective, as_objective, autocast, averages, items_in, losses_of

Learn = Callable[[Any, int | None], Losses]  # (piece, items of the whole batch, None where it is one) → its losses


def in_pieces(batch: Any, items: int, size: int, learn: Learn, *, averages: bool) -> Losses:
    """The losses of a batch that is learnt from in pieces of at most `size` items."""
    if size >= items:
        return learn(batch, None)
    joint: Losses | None = None
    for piece in pieces_of(batch, items, size):
        losses = learn(piece, items)
        joint = losses if joint is None else joint.with_piece(losses, averages=averages)
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
    """Forward and backward passes of a step; one that runs out of memory is taken back and repeated in pieces.

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
        items = items_in(batch)
        attempt = partial(self._passed, turn, batch, objective, items)
        if self._survivor is None or not again:
            return attempt(self.size_of(items))
        taken = self._update.set_aside(turn)
        try:
            losses = self._survivor.run(items, attempt, partial(self._undo, taken, batch, contents(batch)))
        except BaseException:
            taken.put()
            raise
        taken.aside.join()
        self._survivor.portion.went_well()
        return losses

    def size_of(self, items: int) -> int:
        """How many of the items of a batch are computed at once."""
        return items if self._survivor is None else self._survivor.portion.of(items)

    def _undo(self, taken: Taken, batch: Any, before: dict[Any, Any] | None) -> None:
        taken.undo()
        restore(batch, before)
        self._give_way()

    def _passed(self, turn: Turn, batch: Any, objective: Objective, items: int, size: int) -> Losses:
        """Forward and backward pass over a batch, in pieces of at most `size` items."""
        form = items if size >= items else next(bounds(items, size))[1]  # only pieces of one size are compiled

        def learn(piece: Any, unit: int | None) -> Losses:
            alike = unit is None or objective is turn.objective or items_in(piece) == form
            with nullcontext() if unit is None else _alone(self._model, items_in(piece)):
                losses = self._losses(objective if alike else turn.objective, piece, turn)
            self._update.add(turn, losses, unit)
            return losses

        return in_pieces(batch, items, size, learn, averages=self._update.averages)

    def _losses(self, objective: Objective, batch: Any, turn: Turn) -> Losses:
        if self._autocast is None:
            return losses_of(objective, self._model, batch, turn.name)
        with self._autocast:
            return losses_of(objective, self._model, batch, turn.name)


class Backward:
    """Forward and backward pass of a batch, in pieces where it does not fit; made by `survive_oom`."""

    def __init__(self, model: nn.Module, objective: Objective, criterion: Criterion | None) -> None:
        self._model, self._objective = model, objective
        self._modules = [model, *([criterion] if isinstance(criterion, nn.Module) else [])]
        self._averages = averages(criterion)
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
        aside, before = Aside(self), contents(batch)

        def undo() -> None:
            aside.undo()
            restore(batch, before)

        try:
            losses = self._survivor.run(items_in(batch), partial(self._attempt, batch, device), undo)
        except BaseException:
            aside.put()
            raise
        aside.join()
        self._survivor.portion.went_well()
        return losses.total

    def _attempt(self, batch: Any, device: torch.device, size: int) -> Losses:
        window = Window()

        def learn(piece: Any, unit: int | None) -> Losses:
            with nullcontext() if unit is None else _alone(self._model, items_in(piece)):
                losses = losses_of(self._objective, self._model, piece)
            weighs = unit is not None and self._averages
            loss = window.weighed(losses, unit) if weighs else losses.total
            if loss is not None:
                loss.backward()
            losses.let_go()
            return losses

        losses = in_pieces(batch, items_in(batch), size, learn, averages=self._averages)
        if window.is_weighed:
            window.divide(self.parameters, device)
        return losses


def survive_oom(model: nn.Module, loss: Criterion | None = None, *, objective: Objective | None = None) -> Backward:
    """Forward and backward pass for a loop of your own that do not die when memory runs out.

    What is returned is called with a batch that is where the model is. When memory runs out, everything that the
    attempt changed is put back (gradients, random numbers, buffers) and the batch is run again in pieces, with the
    gradient of the whole batch: pieces weigh as many items as they hold, or as an objective says that returns
    `(loss, weight)`. The size that fits is remembered and grows back. Gradients that are there are added to.

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
    return Backward(model, as_objective(loss, objective), loss)
