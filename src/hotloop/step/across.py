"""An objective on several ranks, through DDP or FSDP, and the weights of their batches."""

import math
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hotloop._torch import foreach_div_, ignored_by_ddp
from hotloop.device.clock import Clock
from hotloop.errors import BadArgument, DoesNotFit, HotloopError, PlanWarning
from hotloop.objective.objectives import Losses, Objective
from hotloop.printing.text import shorten
from hotloop.ranks.group import Ranks
from hotloop.step.eager import OneProcess
from hotloop.step.sharding import refuse_lazy
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.step.window import AgreedWeights, Window

SEEN = 3  # updates, in which it shows which parameters get gradients and how losses are weighed; then DDP is built
TIMED, KEPT = 4, 64  # one update in so many is timed, and so many of them are kept


class UpdateTimes:
    """Seconds of a rank's own work in an update and of its waiting for others, by events that are read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._updates = 0
        self._clock: Clock | None = None  # since the update before, of one that is timed
        self._sent: Any = None
        self._laps: deque[tuple[Clock, Any, Any]] = deque(maxlen=KEPT)

    def sent(self) -> None:
        """Mark that all gradients of this rank are sent."""
        if self._clock is not None:
            self._sent = self._clock.lap()

    def synchronized(self) -> None:
        """Mark that the gradients of all ranks are reduced."""
        if self._clock is not None and self._sent is not None:
            self._laps.append((self._clock, self._sent, self._clock.lap()))
        self._updates += 1
        self._clock = Clock(self._device) if self._updates % TIMED == 0 else None
        self._sent = None

    def medians(self) -> tuple[float, float] | None:
        """Median seconds of own work and of waiting in updates that the device has done; None where none was timed."""
        done = [(clock, sent, end) for clock, sent, end in list(self._laps) if clock.has_reached(end)]
        if not done:
            return None
        times = [(clock.seconds(sent), clock.seconds(end)) for clock, sent, end in done]
        return median(own for own, _ in times), median(end - own for own, end in times)


class AcrossRanks(OneProcess, ABC):
    """Calls an objective on several ranks, and averages its gradients over all of them.

    The gradient of a step is that of all ranks' batches in one: each batch weighs as much as its loss is the mean over,
    as in an accumulation window. `Window.average` divides by the mean of the ranks' weights. That takes a collective
    only where weights may differ: at the first batch ranks agree whether an item weighs the same in all of theirs, and
    `is_even` says whether all ranks have batches of one size in this step. `is_filler`: this batch counts for nothing.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        trained: TrainedObjective,
        *,
        is_even: Callable[[], bool] = lambda: False,
        is_filler: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ranks, self.is_even, self.is_filler = ranks, is_even, is_filler
        self.size = ranks.size
        self.model, self.trained = model, trained
        self._finished = 0  # windows
        self.agreement: AgreedWeights = AgreedWeights(ranks.size)
        self._agreed_in: int | None = None  # window
        self._was_told = False  # that a loss is weighed by its items
        self._sum: tuple[Tensor, Any] | None = None  # of weights, on its way
        self._is_lost = False  # whether a pass failed that cannot be repeated

    def through(self, objective: Objective) -> Objective:
        return partial(self._call, objective)

    def _call(self, objective: Objective, model: nn.Module, batch: Any) -> Any:
        if self._is_lost:
            raise DoesNotFit(
                f"memory ran out on {self.ranks} when other ranks had begun to work with this one on the same batch,"
                " which cannot be repeated",
                fix="use smaller batches, bf16 or activation checkpointing; with save= and resume=True the run goes on"
                " from its last checkpoint",
            )
        return self._forward(objective, batch)

    @abstractmethod
    def _forward(self, objective: Objective, batch: Any) -> Any:
        """The objective on a batch."""

    def weighed(self, window: Window, losses: Losses, *, is_last: bool) -> Tensor:
        """The loss times its weight among those of all ranks."""
        total = losses.total
        is_filler = self.is_filler()
        if self.agreement.windows < SEEN and self._agreed_in != self._finished:
            self._agree(losses)
        self._hold_to_agreement(losses)
        if is_filler:
            losses.weight = losses.mass * 0
        weighed = window.weighed(losses, unit=self.agreement.unit)
        if losses.is_sum:
            weighed = None if is_filler else total * self.size
        if is_last:
            self._begin_sum(window)
        return total * 0.0 if weighed is None else weighed

    def share_buffers(self) -> None:
        self._take_from_first(buffer for buffer in self.model.buffers() if not is_lazy(buffer))

    def _take_from_first(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0, group=self.ranks.group)

    def after_backward(self, losses: Losses) -> None:
        if self.is_filler():
            losses.count = 0

    def resume(self, agreement: AgreedWeights) -> None:
        # Another number of ranks has batches of other sizes, and agrees anew.
        self.agreement = agreement if agreement.ranks == self.size else AgreedWeights(self.size)

    def finish(self, window: Window) -> None:
        self._finished += 1
        if self._sum is None:
            return
        (total, work), self._sum = self._sum, None
        work.wait()
        mean = total / self.size
        window.weight = mean if self.agreement.on_device else float(mean)

    def _agree(self, losses: Losses) -> None:
        """In the first windows: agree how losses are weighed, so that all ranks reduce weights in the same steps.

        The first batches of each rank show that: there losses are read and compared.
        """
        mass = losses.mass
        is_by_items = not (losses.by_values or losses.is_counted or isinstance(mass, Tensor))
        ratio = float(mass / max(losses.count, 1)) if is_by_items else None
        every = self.ranks.gather([float(losses.unit), ratio, isinstance(mass, Tensor), losses.is_sum])
        units, ratios, on_device, sums = zip(*every, strict=True)
        common = ratios[0] if len(set(ratios)) == 1 else None
        self.agreement = AgreedWeights(
            self.size, self.agreement.windows + 1, max(units), common, any(on_device), all(sums)
        )
        self._agreed_in = self._finished

    def _hold_to_agreement(self, losses: Losses) -> None:
        """Weigh a loss as ranks agreed, and warn where it is unlike the first; a new agreement would synchronize."""
        mass, ratio = losses.mass, self.agreement.ratio
        is_other = losses.is_sum != self.agreement.is_sum
        losses.is_sum = self.agreement.is_sum
        if ratio is not None and not losses.is_sum:
            is_other = is_other or isinstance(mass, Tensor) or not math.isclose(mass, ratio * losses.count)
            losses.weight = ratio * losses.count if is_other else losses.weight
        if is_other and not self._was_told:
            self._was_told = True
            warnings.warn(
                f"what the loss is the mean over is not the same in all batches, and was in the first ones of all"
                f" ranks: {self.ranks} weighs such batches by their items. fix: return (loss, weight) from an"
                " objective, weight being what the loss is the mean over",
                PlanWarning,
                stacklevel=2,
            )

    def _begin_sum(self, window: Window) -> None:
        """Start the all-reduce of the window's weight, which overlaps the backward pass."""
        agreed = self.agreement
        if agreed.is_sum or self._sum is not None or (agreed.ratio is not None and self.is_even()):
            return  # sums have no weight, a pass over the same batch that failed has begun it, or it is known
        weight = window.weight.detach() if isinstance(window.weight, Tensor) else torch.tensor(float(window.weight))
        total = weight.to(self.ranks.device if agreed.on_device else "cpu", torch.float32, copy=True)
        group = self.ranks.group if agreed.on_device else self.ranks.hosts
        self._sum = (total, dist.all_reduce(total, group=group, async_op=True))


class Shards(AcrossRanks):
    """Through FSDP, which is inside the model: every pass gathers weights and reduces gradients.

    Of an unsharded gradient, which would wait for the last batch of a window, there is no room.
    """

    is_whole = False

    def _forward(self, objective: Objective, batch: Any) -> Any:
        return objective(self.model, batch)

    def sets_aside(self, *, is_last: bool) -> bool:
        return False

    def undo(self, *, holds_others: bool) -> None:
        self._is_lost = True  # the other ranks wait for the rest of this pass

    def finish(self, window: Window) -> None:
        if self._sum is None:  # the end of the epoch may have cut the window short
            self._begin_sum(window)
        super().finish(window)


class _ObjectiveModule(nn.Module):
    """The objective as the `forward` of a module, so that DDP sees every call of the model inside it.

    `others` are parameters that are trained with the model's, such as those of a criterion.
    """

    def __init__(self, model: nn.Module, objective: Objective, others: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.model, self.objective, self.others = model, objective, nn.ParameterList(others)

    def forward(self, batch: Any, objective: Objective) -> Any:
        """`objective` is that of the module, or it compiled or watched."""
        return objective(self.model, batch)


class Replicas(AcrossRanks):
    """Through DDP. The first steps average gradients after the backward pass, to see which parameters are used."""

    def __init__(self, ranks: Ranks, model: nn.Module, trained: TrainedObjective, **how: Any):
        super().__init__(ranks, model, trained, **how)
        known = set(map(id, model.parameters()))
        others = [p for p in trained.parameters if id(p) not in known]
        if not all(isinstance(p, nn.Parameter) for p in others):
            raise BadArgument(
                "the optimizer has a tensor that is no nn.Parameter, whose gradients DDP would not send",
                fix="make it one: nn.Parameter(tensor)",
            )
        self._module = _ObjectiveModule(model, trained.objective, others)
        self._was_sent = False  # whether a bucket of gradients of this pass was
        self._is_synchronized = False  # whether the gradients of the window are those of all ranks
        self._has_begun = False  # whether a backward pass over this batch has
        self._unused: set[int] = set()  # parameters that had no gradient in the first steps
        self._ddp: DistributedDataParallel | None = None  # once it is known which parameters get gradients
        self._builds_at = SEEN  # updates
        self._learning: list[bool] = []  # whether each parameter was trained when DDP was built
        self._is_same = False  # whether all ranks have the weights of rank 0
        self.pace = self._times = UpdateTimes(ranks.device)

    def _forward(self, objective: Objective, batch: Any) -> Any:
        self._was_sent = False
        if not self._is_same:
            refuse_lazy(self.model)
            self._take_from_first([*self._module.parameters(), *self._module.buffers()])
            self._is_same = True
        return (self._ddp or self._module)(batch, objective)

    def _built(self) -> DistributedDataParallel:
        mine = set(map(id, self.trained.parameters))
        others = [name for name, p in self._module.named_parameters() if id(p) not in mine]
        looks = any(self.ranks.gather(bool(self._unused)))
        with ignored_by_ddp(self._module, others):
            ddp = DistributedDataParallel(
                self._module, process_group=self.ranks.group, find_unused_parameters=looks, init_sync=False
            )
        ddp.register_comm_hook(None, self._send)
        return ddp

    def _send(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        self._was_sent = True
        if bucket.is_last():
            self._times.sent()
        return allreduce_hook(self.ranks.group or dist.group.WORLD, bucket)  # type: ignore[arg-type]  # it is there

    def synchronizing(self, *, is_last: bool) -> AbstractContextManager[None]:
        learning = [p.requires_grad for p in self.trained.parameters]
        if self._ddp is not None and learning != self._learning:  # layers were frozen, or are no longer
            self._ddp, self._builds_at = None, self._finished + SEEN
            self._unused.clear()
        if self._ddp is None and self._finished >= self._builds_at:
            self._ddp, self._learning = self._built(), learning
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()

    def sets_aside(self, *, is_last: bool) -> bool:
        return not is_last  # whose pass sends all of them

    def undo(self, *, holds_others: bool) -> None:
        # Once DDP has been prepared for a backward pass, it sends what the next one computes, a micro-batch or not.
        self._is_lost = self._was_sent or (self._has_begun and (holds_others or self._ddp is not None))
        if self._ddp is not None:
            self._ddp.require_forward_param_sync = False  # the failed pass has had the buffers of rank 0 already

    def weighed(self, window: Window, losses: Losses, *, is_last: bool) -> Tensor:
        self._is_synchronized = is_last and self._ddp is not None
        self._has_begun = True
        return super().weighed(window, losses, is_last=is_last)

    def after_backward(self, losses: Losses) -> None:
        self._has_begun = False
        super().after_backward(losses)

    def finish(self, window: Window) -> None:
        if not self._is_synchronized:  # in the first steps, and where the end of an epoch cuts a window short
            self._synchronize()
            self._take_from_first(self._module.buffers())
            if self._sum is None:
                self._begin_sum(window)
        elif not self._unused and any(p.grad is None for p in self.trained.parameters if p.requires_grad):
            raise self._without_gradient()
        self._is_synchronized = False
        super().finish(window)
        self._times.synchronized()

    def _synchronize(self) -> None:
        """All-reduce the gradients that no backward pass has reduced."""
        trained = [p for p in self.trained.parameters if p.requires_grad]
        missing = [p for p in trained if p.grad is None]
        self._unused.update(map(id, missing))
        is_used = self.ranks.largest([float(p.grad is not None) for p in trained])  # on any rank
        for parameter, used in zip(trained, is_used, strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in trained if p.grad is not None]
        for work in [dist.all_reduce(each, group=self.ranks.group, async_op=True) for each in gradients]:
            work.wait()
        foreach_div_(gradients, float(self.size))

    def _without_gradient(self) -> HotloopError:
        mine = {id(p) for p in self.trained.parameters if p.grad is None and p.requires_grad}
        names = [n.removeprefix("model.") for n, p in self._module.named_parameters() if id(p) in mine]
        return DoesNotFit(
            f"{shorten(names, 3)} had no gradient in this step on {self.ranks}, though all had one in the first steps",
            fix="let every parameter take part in each step, if only times 0",
        )
