"""The ranks of a run: what a checkpoint holds of each, and what is said of all."""

from collections.abc import Mapping
from typing import Any

import torch

from hotloop.checkpoint.tree import unpack
from hotloop.printing.text import plural
from hotloop.training.kernel import RunState
from hotloop.training.part import FitArguments, Part, Saved


class RanksTogether(Part):
    """Saves the rng states of all ranks; a single process is one rank."""

    name = "ranks"
    after = ("loop", "data")
    size: Saved[int]
    batch: Saved[int | None]  # items of a step on all ranks together
    random: Saved[list[Any]]  # rng states, rank by rank

    def __init__(self, run: RunState, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._loader = asked.loader

    def begin(self) -> None:
        run = self.run
        if (words := run.core.together.words(run.core.model, run.core.plan, self._loader)) is not None:
            run.say(words)

    def end_epoch(self, whole: bool) -> None:
        if whole and self.run.length is None:
            self.run.core.together.meet(self.run.core.epoch, self.run.batches)

    def finish(self) -> None:
        self.run.core.together.end()

    def report(self) -> Mapping[str, Any]:
        together = self.run.core.together
        return {
            "ranks": together.size,
            "batch": together.global_batch(self._loader),
            "by_rank": together.by_rank(self.run.core.step),
            "parallel": None if together.spread is None else together.spread.words(),
        }

    def state_dict(self) -> dict[str, Any]:
        together = self.run.core.together
        self.size, self.batch = together.size, together.global_batch(self._loader)
        self.random = together.random_of_all()
        return super().state_dict()

    def adapt(self, tree: dict[str, Any]) -> None:
        """This rank goes on with its own rng states where there were as many, and with none of the first one's sums."""
        state, together, loop = tree[self.name], self.run.core.together, tree["loop"]
        is_other = state["size"] != together.size
        if is_other and (now := together.global_batch(self._loader)) != state["batch"]:
            was = f"{state['batch']} items on {plural(state['size'], 'rank')}"
            self.differs = f"a step had {was} and has {now} on {together.size}"
        if is_other or not together.is_first:
            tree["data"] = {**tree["data"], "position": {**tree["data"]["position"], "last": None}}  # the first one's
        if together.ranks is not None and not is_other and state["random"]:
            plain, data = state["random"][together.ranks.rank]
            tensors = {name: torch.tensor(values, dtype=getattr(torch, kind)) for name, (kind, values) in plain.items()}
            loop["random"] = unpack(tensors, data)
        if not together.is_first:
            loop["watch"] = together.nothing_seen(loop["watch"])
