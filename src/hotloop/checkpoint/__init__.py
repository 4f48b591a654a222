"""Checkpoints on disk: tensors and JSON, whole or not at all, written while training goes on."""
