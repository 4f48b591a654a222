"""The GPU of a Mac, of which nobody but torch tells anything without administrator's rights."""

import importlib
import os
import platform
from typing import Any

from hotloop.monitor.reading import Gpu, Process


def read(torch: Any = None) -> Gpu | None:
    """What torch tells of the Mac's GPU; None on other machines. Memory is that of this process alone."""
    if torch is None and platform.system() != "Darwin":
        return None
    try:
        torch = torch or importlib.import_module("torch")  # only here: elsewhere a monitor starts without it
        if not torch.backends.mps.is_available():
            return None
        held, most = int(torch.mps.driver_allocated_memory()), int(torch.mps.recommended_max_memory())
    except Exception as error:  # noqa: BLE001  # whatever Metal raises is a line in the reading
        return Gpu(0, "Apple GPU", error=f"torch cannot ask the GPU: {str(error).strip() or type(error).__name__}")
    mine = Process(os.getpid(), held, "compute", ours=True)
    # how much others use of the memory that the GPU shares with the processor, nobody tells: it stays unknown
    return Gpu(0, "Apple GPU", memory_total=most, processes=(mine,) if held else ())
