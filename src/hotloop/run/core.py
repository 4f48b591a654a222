"""`Core`: what lives as long as a loop, built and joined."""

from typing import TYPE_CHECKING, Any

from hotloop.objective.objectives import Criterion
from hotloop.plan import Plan
from hotloop.run.messages import advice_on_loss
from hotloop.run.modes import TrainingModes
from hotloop.run.plan_switch import PlanSwitch
from hotloop.run.run_ranks import Alone
from hotloop.run.schedulers import Schedule
from hotloop.run.training_data import TrainingData
from hotloop.run.watch import Watch
from hotloop.tune.subject import Subject
from hotloop.tune.tuner import Tuner

if TYPE_CHECKING:
    from hotloop.run.changes import Changes


class Core:
    """What a loop has besides its arguments; a run and its parts work on these."""

    def __init__(
        self,
        subject: Subject,
        begin: Plan,
        ranks: Alone,
        *,
        criterion: Criterion | None,
        schedule: Schedule,
        stateful: dict[str, Any],
        plans_itself: bool,
        by_hand: bool,
    ) -> None:
        self.subject, self.ranks, self.schedule, self.stateful = subject, ranks, schedule, stateful
        self.criterion = criterion  # as the person gave it
        self.modes = TrainingModes(subject.model, subject.optimizers)
        single = len(subject.objectives) == 1
        self.watch = Watch(subject.device, single=single, advice=advice_on_loss(begin))
        self.switch = PlanSwitch(
            subject,
            begin,
            self.watch,
            schedule,
            ranks,
            given=lambda: self.data.given,
            # The tuner is made after the switch.
            rescue=lambda run, batch: self.tuner.guard.repeated_in_fp32(run, batch),  # noqa: PLW0108
            refused=lambda why: self.tuner.record.capture_failed(why),  # noqa: PLW0108
            plans_itself=plans_itself,
            by_hand=by_hand,
        )
        self.tuner = Tuner(subject, self.switch, asked=plans_itself, listen=self.watch.listen)
        self.data = TrainingData(self.switch, self.tuner, self.watch, schedule, self.modes, ranks)
        self.changes: Changes | None = None  # of the person's objects since the first run that was saved
