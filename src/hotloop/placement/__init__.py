"""Putting tensors where they belong, and explaining when one is not there."""

from hotloop.placement.golden import golden_rule
from hotloop.placement.moving import map_tensors, move, pin, tensors_in, to_numpy, upload
from hotloop.placement.placing import place

__all__ = ["golden_rule", "map_tensors", "move", "pin", "place", "tensors_in", "to_numpy", "upload"]
