"""Checkpoints on disk: tensors and JSON, whole or not at all, written while training goes on."""

from hotloop.checkpoint.damage import CheckpointWarning, DamagedCheckpoint
from hotloop.checkpoint.reader import Checkpoint, load
from hotloop.checkpoint.shards import Team
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.weights import Weights, export_weights, read_weights
from hotloop.checkpoint.writer import Problem, Writer

__all__ = [
    "Checkpoint",
    "CheckpointWarning",
    "DamagedCheckpoint",
    "Problem",
    "Store",
    "Team",
    "Weights",
    "Writer",
    "export_weights",
    "load",
    "read_weights",
]
