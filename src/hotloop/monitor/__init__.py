"""Looking at the hardware: a `Sampler` takes a `Reading` of GPUs, their processes and the host."""
