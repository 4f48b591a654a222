"""The ranks of a run: what a checkpoint holds of each, and what is said of all."""

from collections.abc import Mapping
from typing import Any

import torch

from hotloop.printing.text import plural
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.values.saved import Count, Saved


class RanksTogether(Part):
    """Saves the rng states of all ranks; a single process is one rank."""

    name = "ranks"
    after = ("loop", "data")
    size: Saved[Count]
    batch: Saved[Count | None]  # items of a step on all ranks together
    random: Saved[list[Any]]  # rng states, rank by rank

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        size = getattr(asked.loader, "batch_size", None)
        self._batch = size * run.core.ranks.size if isinstance(size, int) else None  # items of a step on all ranks

    def begin(self) -> None:
        run = self.run
        if (words := run.core.ranks.words(run.core.subject.model, run.core.switch.plan, self._batch)) is not None:
            run.say(words)

    def end_epoch(self, whole: bool) -> None:
        if whole and self.run.length is None:
            self.run.core.ranks.end_epoch(self.run.core.data.epoch, self.run.batches)

    def finish(self) -> None:
        self.run.core.ranks.end()

    def report(self) -> Mapping[str, Any]:
        ranks = self.run.core.ranks
        return {
            "ranks": ranks.size,
            "batch": self._batch,
            "by_rank": ranks.by_rank(self.run.core.switch.step),
            "parallel": ranks.parallel,
        }

    def state_dict(self) -> dict[str, Any]:
        ranks = self.run.core.ranks
        self.size, self.batch, self.random = ranks.size, self._batch, ranks.random_of_all()
        return super().state_dict()

    def adapt(self, tree: dict[str, Any]) -> None:
        """This rank goes on with its own rng states where there were as many, and with none of the first one's sums."""
        state, ranks, loop = tree[self.name], self.run.core.ranks, tree["loop"]
        is_other = state["size"] != ranks.size
        if is_other and self._batch != state["batch"]:
            was = f"{state['batch']} items on {plural(state['size'], 'rank')}"
            self.differs = f"a step had {was} and has {self._batch} on {ranks.size}"
        if is_other or not ranks.is_first:
            tree["data"] = {**tree["data"], "position": {**tree["data"]["position"], "last": None}}  # the first one's
        if ranks.group is not None and not is_other and state["random"]:
            plain, data = state["random"][ranks.group.rank]
            tensors = {name: torch.tensor(values, dtype=getattr(torch, kind)) for name, (kind, values) in plain.items()}
            from hotloop.checkpoint.codec import unpack  # noqa: PLC0415  # only ranks need it

            loop["random"] = unpack(tensors, data)
        if not ranks.is_first:
            loop["watch"] = _nothing_seen(loop["watch"])


def _nothing_seen(watch: dict[str, Any]) -> dict[str, Any]:
    """The state of a `Watch` without sums, for ranks other than the first, which has those of all."""
    nothing = None if watch["sums"] is None else torch.zeros_like(watch["sums"])
    return {**watch, "items": 0, "totals": [0.0 for _ in watch["totals"]], "sums": nothing}
