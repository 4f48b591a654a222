"""A listener that notes what a training asks of the tables: every convolution and operation, and what was allocated.

From that, `leave_out.py` reckons peaks as if a part of the tables had never been measured.
"""

import json
from typing import Any

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.memory import Held, MemoryListener
from hotloop.apps.simulate.need import Need
from hotloop.apps.simulate.workspaces import CONVOLUTION, Asked, asked, measured_as, with_settings


class Asking(MemoryListener):
    """The memory of a card, and what was asked of it."""

    def __init__(self, card: Card) -> None:
        super().__init__(card)
        self._asked: list[Asked] = []  # of the operation that runs
        self._planning = False
        self._without = 0  # the most that was allocated beside the workspaces of convolutions
        self._beside: dict[Asked, int] = {}  # the most that was allocated when it asked
        self._reach: dict[str, int] = {}  # the same of operations, with a copy of their operands

    def before(self, operation: Operation) -> None:
        self._asked = asked(with_settings(operation), self.card) if "convolution" in operation.name else []
        super().before(operation)

    def after(self, operation: Operation) -> None:
        super().after(operation)
        name = measured_as(operation)
        if name is not None:
            operands = sum(shape.nbytes for shape in (*operation.inputs, *operation.outputs))
            self._reach[name] = max(self._reach.get(name, 0), self._allocator.allocated + operands)

    def _take_need(self, need: Need) -> Held | None:
        self._planning = need.what == CONVOLUTION
        try:
            return super()._take_need(need)
        finally:
            self._planning = False

    def _take_in_doubt(self, need: Need) -> Held | None:
        if need.what == CONVOLUTION:
            part = self._asked.pop(0)
            self._beside[part] = max(self._beside.get(part, 0), self._allocator.allocated)
        return super()._take_in_doubt(need)

    def _saw(self) -> None:
        super()._saw()
        if not self._planning:
            self._without = max(self._without, self._allocator.allocated)

    def to_record(self) -> dict[str, Any]:
        told = {
            "without": self._without,
            "convolutions": [[[*part.keys], [*part.case], *part[2:], beside] for part, beside in self._beside.items()],
            "operations": self._reach,
        }
        return {**super().to_record(), "notes": (json.dumps(told),)}  # the field of a record that takes any words
