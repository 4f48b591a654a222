"""One script on several GPUs and machines: torchrun with checks before it, and errors that name the rank."""
