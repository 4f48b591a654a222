"""Applications of the core, each complete in its folder: it can be deleted, and the rest goes on."""
