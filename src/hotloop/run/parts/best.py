"""The best epoch of a run, early stopping, and the weights of the best epoch at the end."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.errors import HotloopError
from hotloop.printing.text import printable
from hotloop.records import BestEpoch, Epoch
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.step.sharding import local_shard, sharded
from hotloop.values.snapshot import Snapshot


class Best(Part):
    """Compares each epoch once, since there may be thousands."""

    name = "best"
    after = ("validation", "schedule")

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        hooks = asked.hooks
        self._goal, self._patience, self._restores = hooks.goal, hooks.patience, hooks.restores_best
        self._saver = asked.saver
        self._score = math.inf
        self._weights: list[dict[str, Any]] | None = None  # of the best epoch of this part, where they are wanted

    def begin(self) -> None:
        for epoch in self.run.history:
            self._see(epoch)
        if self.run.history and not self.run.batches and self.run.unevaluated is None:
            self.after_epoch()

    def epoch_known(self, epoch: Epoch) -> None:
        if epoch.metrics:
            self._goal.check(epoch.metrics)
        self._see(epoch)

    def epoch_done(self, epoch: Epoch) -> None:
        if self._restores and self._is_best(epoch):
            self._weights = _weights_of(self._modules())

    def after_epoch(self) -> None:
        """End the run where the last `patience` epochs were no better."""
        run = self.run
        if self._patience is None or run.is_cut_short:
            return
        if (words := self._goal.words_for_patience(run.best, run.history[-1], self._patience)) is not None:
            run.stop.ask(words, is_final=True)

    def finish(self) -> None:
        """Load the weights of the best epoch into model and criterion; where they do not fit, nothing changes."""
        run, best = self.run, self.run.best
        if not self._restores or best is None or self._is_best(run.history[-1]):
            return
        from hotloop.run.state import load_module  # noqa: PLC0415  # few runs need it

        modules = self._modules()
        run.core.modes.eval()  # as the optimizer was when they were kept
        with run.core.switch.unplanned():
            before = Snapshot().values((t for m in modules for t in (*m.parameters(), *m.buffers())), on_host=True)
            try:
                weights = self._weights or self._saved_weights(best.epoch, modules)
                for module, values in zip(modules, weights, strict=True):
                    now = module.state_dict()
                    load_module(module, {name: _loadable(now.get(name), each) for name, each in values.items()})
            except (RuntimeError, HotloopError) as error:
                before.restore()
                warnings.warn(
                    f"restore_best: the weights of epoch {best.epoch} cannot be restored, so those of the last epoch"
                    f" stay: {printable(' '.join(getattr(error, 'what', str(error)).split())[:300])}",
                    CheckpointWarning,
                    stacklevel=4,
                )

    def _modules(self) -> list[nn.Module]:
        from hotloop.run.state import modules_of  # noqa: PLC0415  # the same

        return modules_of(self.run.core)

    def report(self) -> Mapping[str, Any]:
        return {"best": self.run.best}

    def _see(self, epoch: Epoch) -> None:
        score = self._goal.score(epoch)
        if score < self._score:
            self._score = score
            self.run.best = BestEpoch(epoch.number, self._goal.metric, epoch.metrics[self._goal.metric])

    def _is_best(self, epoch: Epoch) -> bool:
        return self.run.best is not None and self.run.best.epoch == epoch.number

    def _saved_weights(self, number: int, modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
        """The weights of the best epoch from the checkpoint of an earlier part of the run."""
        tree = None if self._saver is None else self._saver.read_best()
        if tree is None:
            raise HotloopError("no checkpoint holds them")
        if tree["data"]["epoch"] != number:
            raise HotloopError(f"the best checkpoint is of epoch {tree['data']['epoch']}")
        states = [tree["loop"]["model"], *tree["loop"]["others"]]
        return [dict(sharded(*pair)) for pair in zip(modules, states, strict=True)]


def _weights_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The state_dicts of modules, copied to the host."""
    return [
        {
            name: local_shard(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in module.state_dict().items()
        }
        for module in modules
    ]


@torch.no_grad()
def _loadable(now: Any, value: Any) -> Any:
    """A value for `load_state_dict`; a local shard is copied into its sharded tensor."""
    if not hasattr(now, "to_local") or not isinstance(value, Tensor) or hasattr(value, "to_local"):
        return value
    now.to_local().copy_(value)
    return now
