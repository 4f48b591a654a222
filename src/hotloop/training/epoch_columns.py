"""The epochs of a run as columns of numbers, for checkpoints: their JSON does not grow with the run."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hotloop.records import Epoch

_NUMBERS = {"number": "q", "loss": "d", "items": "q", "seconds": "d"}  # typecodes
_NAMED = ("losses", "metrics", "train_metrics")  # values by name, which not all epochs have


class EpochColumns:
    """Arrays that grow by the epochs that are new since they were asked for last."""

    def __init__(self) -> None:
        self._count = 0
        self._numbers = {name: array(code) for name, code in _NUMBERS.items()}
        self._named: dict[str, dict[str, tuple[array[int], array[float]]]] = {name: {} for name in _NAMED}

    def state_dict(self, epochs: Sequence[Epoch]) -> dict[str, Any]:
        """The columns of `epochs`; of a named value, the rows that have it and what they have."""
        for row, epoch in enumerate(epochs[self._count :], self._count):
            for name, column in self._numbers.items():
                column.append(getattr(epoch, name))
            for kind, columns in self._named.items():
                for name, value in getattr(epoch, kind).items():
                    rows, values = columns.setdefault(name, (array("q"), array("d")))
                    rows.append(row)
                    values.append(value)
        self._count = len(epochs)
        named = {
            kind: {name: [np.array(rows), np.array(values)] for name, (rows, values) in columns.items()}
            for kind, columns in self._named.items()
        }
        return {name: np.array(column) for name, column in self._numbers.items()} | named


def epochs_of(state: Any) -> list[Epoch]:
    """The epochs of columns; of a list of records, as checkpoints had it before."""
    if not isinstance(state, Mapping):
        return [Epoch.from_json(each) for each in state]
    count = len(state["number"])
    fields: list[dict[str, Any]] = [{kind: {} for kind in _NAMED} for _ in range(count)]
    for name in _NUMBERS:
        for row, value in enumerate(state[name].tolist()):
            fields[row][name] = value
    for kind in _NAMED:
        for name, (rows, values) in state[kind].items():
            for row, value in zip(rows.tolist(), values.tolist(), strict=True):
                fields[row][kind][name] = value
    return [Epoch(**each) for each in fields]


def is_history(state: Any) -> bool:
    """Whether it is what `EpochColumns` gives."""
    if not isinstance(state, Mapping) or not {*_NUMBERS, *_NAMED} <= state.keys():
        return False
    count = len(state["number"]) if isinstance(state["number"], np.ndarray) else 0
    are_numbers = all(_is_column(state[name], code, count) for name, code in _NUMBERS.items())
    named = [state[kind] for kind in _NAMED]
    if not are_numbers or not all(isinstance(each, Mapping) for each in named):
        return False
    sound = (state["number"] > 0).all() and (state["items"] >= 0).all()
    sound = sound and bool(np.isfinite(state["seconds"]).all() and (state["seconds"] >= 0).all())
    return bool(sound) and all(_is_named(name, held, count) for each in named for name, held in each.items())


def _is_named(name: Any, held: Any, count: int) -> bool:
    if type(name) is not str or not isinstance(held, list) or len(held) != 2 or not isinstance(held[0], np.ndarray):
        return False
    rows, values = held
    if not _is_column(rows, "q", len(rows)) or not _is_column(values, "d", len(rows)):
        return False
    return not len(rows) or bool(rows[0] >= 0 and rows[-1] < count and (np.diff(rows) > 0).all())


def _is_column(value: Any, code: str, length: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == code and value.shape == (length,)
