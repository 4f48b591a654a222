"""Batches on the device, and where they come from."""

from hotloop.data.origin import Origin, length_of
from hotloop.data.stream import Stream, stream

__all__ = ["Origin", "Stream", "length_of", "stream"]
