"""A GPU that is not here: what a training script would do on it, found without one."""
