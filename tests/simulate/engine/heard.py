"""A listener that tells everything that it heard, as notes of the simulation."""

import json

import torch


class Heard:
    def __init__(self, card):
        self.events = [["card", card.key]]

    def allocated(self, key, size, kind):
        self.events.append(["allocated", key, size, kind])

    def freed(self, key):
        self.events.append(["freed", key])

    def named(self, key, kind):
        self.events.append(["named", key, kind])

    def before(self, operation):
        self.events.append(["before", operation.name])

    def after(self, operation):
        inputs = [(list(s.sizes), s.dtype, s.device) for s in operation.inputs]
        outputs = [(list(s.sizes), s.dtype, s.device) for s in operation.outputs]
        line = operation.place.line if operation.place else None
        self.events.append(["after", operation.name, operation.phase, operation.module, line, inputs, outputs])

    def copied(self, size, direction, *, pinned, blocking, place):
        self.events.append(["copied", size, direction, pinned, blocking])

    def waited(self, kind, place):
        self.events.append(["waited", kind])

    def host(self, seconds, kind="data", workers=0):
        self.events.append(["host", seconds, kind, workers])

    def step(self):
        self.events.append(["step"])

    def to_record(self):
        return {"notes": [json.dumps(event) for event in self.events]}


class Small(Heard):
    """Has room for 100,000 bytes."""

    def __init__(self, card):
        super().__init__(card)
        self.sizes = {}

    def allocated(self, key, size, kind):
        if sum(self.sizes.values()) + size > 100_000:
            raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")
        self.sizes[key] = size

    def freed(self, key):
        self.sizes.pop(key, None)

    def to_record(self):
        return {}
