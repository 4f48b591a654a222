"""How much memory of a device can still be taken."""

import torch


def free(device: torch.device) -> int | None:
    """Bytes that nobody has on a device, as far as it tells: other processes and a cap are counted in."""
    if device.type != "cuda":
        return None
    unused, total = torch.cuda.mem_get_info(device)
    return min(unused, int(total * share(device)) - torch.cuda.memory_reserved(device))


def room(device: torch.device) -> int | None:
    """Bytes that could still be taken on a device: the free ones, and those that PyTorch holds for later."""
    unused = free(device)
    return None if unused is None else unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def share(device: torch.device) -> float:
    """The share of a device that this process may take."""
    if device.type != "cuda":
        return 1.0
    # PyTorch refuses "cuda" without a number here, unlike where it tells of memory.
    return torch.cuda.get_per_process_memory_fraction(device.index)
