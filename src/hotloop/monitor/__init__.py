"""Looking at the hardware: `Sampler` takes a `Reading` of GPUs, their processes and the host."""

from hotloop.monitor.reading import Gpu, Host, Process, Reading
from hotloop.monitor.sampler import Sampler

__all__ = ["Gpu", "Host", "Process", "Reading", "Sampler"]
