"""A listener that tells everything that it heard, as notes of the simulation."""

import json


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

    def loaded(self, seconds, workers):
        self.events.append(["loaded", seconds, workers])

    def step(self):
        self.events.append(["step"])

    def to_record(self):
        return {"notes": [json.dumps(event) for event in self.events]}
