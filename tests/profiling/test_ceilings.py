"""What a device can do at most is measured with the switches that its name says, and they are put back."""

import torch

from hotloop.profiling.ceilings import ceilings


def test_a_cpu_has_a_speed_of_arithmetic_and_of_memory() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    limits = ceilings(torch.device("cpu"), quick=True)
    assert set(limits) == {"fp32", "bytes"}
    assert all(limit > 1e6 for limit in limits.values())
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
