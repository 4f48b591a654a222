"""Putting tensors where they belong, and explaining when one is not there."""

from hotloop.placement.moving import map_tensors, move, pin, tensors_in, to_numpy, upload
from hotloop.placement.placing import place

__all__ = ["map_tensors", "move", "pin", "place", "tensors_in", "to_numpy", "upload"]
