"""`Loop` carries out a `Plan`: one step, an epoch, an evaluation."""

from hotloop.run.loop import Loop

__all__ = ["Loop"]
