"""`Position`: where a loader is inside an epoch, as plain data, and how an epoch is begun there again.

A run that goes on from a position gets exactly the batches that it would have got. These are the steps, in this order:

1. workers that persist between epochs are started where they had been, with nothing to load, and with the rng states
   that they had when the epoch began;
2. the rng states of the epoch's beginning are restored: global ones, generators of the loader, its samplers and its
   dataset, and what samplers tell of themselves;
3. the iterator is made, which draws from them what it drew then: a seed for workers, and from most samplers the order;
4. what the training has had is skipped. Indices are drawn and dropped where no more is needed; batches are loaded and
   dropped where workers make random items, because only that brings the workers to where they were; another number of
   workers makes other ones anyhow, from seeds of its own;
5. batches that had been read ahead are read again, each with the rng states that it was read with;
6. the generators of the loader get the states of the moment of the checkpoint, in case others draw from them too;
7. the caller restores the global states of that moment, and begins the epoch.

Steps 1 to 6 are `Epochs.resume`, and the epoch that is begun next goes on with what they left ready. Between two epochs
there is nothing to skip: only 1 and 6 are done, so that the next epoch begins as it would have. `Stream.change_workers`
goes through the same steps inside a run.
"""

from dataclasses import dataclass
from typing import Any

from hotloop.data.loader_rng import LoaderRngState
from hotloop.errors import BadArgument

POSITION_FORMAT = 2


@dataclass(frozen=True)
class Position:
    """The position of a loader in its epoch: what it takes to resume with the same batches."""

    consumed: int | None  # batches of the epoch that the training has had; None between two epochs
    began: LoaderRngState  # when the epoch's iterator was made
    now: LoaderRngState  # when the position was asked for
    read: int = 0  # batches of the epoch that were read, those ahead of the training included
    ended: bool = False  # whether the loader had said that there are no more
    ahead: tuple[LoaderRngState, ...] = ()  # when each batch ahead was read, where that matters
    last: tuple[int, ...] | None = None  # the samples of the last batch that the training had
    begun: bool = False  # whether workers that persist were there when the epoch began
    workers: int = 0
    prefetched: int = 0  # batches that the workers are asked for in advance
    carried: tuple[LoaderRngState, ...] = ()  # the rng states of workers that persist, when the epoch began
    loader: Any = None  # the loader's own account of where it is, where it gives one
    reason: str | None = None  # why not all can be the same again

    def state_dict(self) -> dict[str, Any]:
        """The position as nested data; a checkpoint can hold it if it can hold the states of samplers."""
        fields = vars(self) | {"began": vars(self.began), "now": vars(self.now)}
        fields |= {"ahead": [vars(m) for m in self.ahead], "carried": [vars(m) for m in self.carried]}
        return {"format": POSITION_FORMAT, **fields}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Position":
        """The position of a `state_dict`."""
        try:
            fields = dict(state)
            if fields.pop("format") != POSITION_FORMAT:
                raise ValueError("another format")
            for name in ("began", "now"):
                fields[name] = LoaderRngState(**fields[name])
            for name in ("ahead", "carried"):
                fields[name] = tuple(LoaderRngState(**state) for state in fields[name])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadArgument(
                f"this is no position of a loader: {error!r}", fix="use the version of hotloop that wrote it"
            ) from error


@dataclass(frozen=True)
class Resumption:
    """What it took to go on from a position, and how exact it is."""

    skipped: int = 0  # batches that the training has had
    loaded: int = 0  # how many of them were loaded again
    reason: str | None = None  # why the rest may not be the same in everything; None: it is
