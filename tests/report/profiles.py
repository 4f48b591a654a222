"""Profiles as the tests need them: composed timelines, analysed."""

from hotloop.placement.sites import Site
from hotloop.profiling.analysis import analyse
from hotloop.profiling.operation_log import LoggedOperation
from hotloop.profiling.profile_record import MemorySample, Profile
from hotloop.profiling.trace import MARK, TraceEvent

STEP = 0.02  # seconds


def made_profile(device: str = "cuda:0", name: str = "train.py", steps: int = 6) -> Profile:
    """Steps of twenty milliseconds: data, a copy, two layers forward and backward, an update, a read of the loss."""
    events = [TraceEvent(MARK, "mark", 0.0, 0.0, 1)]
    for step in range(steps):
        longer = 0.006 if step in (2, 4) else 0.0  # two steps wait longer for data
        events += _step(events[-1].end, longer, step * 10, cuda=device != "cpu")
    memory = tuple(
        MemorySample(at / 40, phase, 400_000, gradients, 800_000, activations, 200_000 + 3000 * at)
        for at, (phase, gradients, activations) in enumerate(
            [("data", 400_000, 0)] * 8
            + [("forward", 0, 100_000 * n) for n in range(12)]
            + [("backward", 33_000 * n, 1_100_000 - 90_000 * n) for n in range(12)]
            + [("update", 400_000, 0)] * 6
        )
    )
    return analyse(
        events,
        _seen(),
        name=name,
        device=device,
        device_name="Test device",
        date="2026-01-02T03:04:05+00:00",
        versions={"python": "3.11.0", "torch": "2.13.0"},
        skipped=9,
        plain=0.0195,
        memory=memory,
        peak_memory=2_900_000 if device != "cpu" else None,
        ceilings={"fp32": 40e12, "bf16": 600e12, "bytes": 3e12},
    )


def _seen() -> list[LoggedOperation]:
    net, loop = "/project/net.py", "/project/train.py"
    return [
        LoggedOperation("aten::_to_copy", "forward", Site(loop, 20), "64×784", 0.0, "fp32"),
        LoggedOperation("aten::addmm", "forward", Site(net, 11), "64×784, 784×512", 5e10, "fp32"),
        LoggedOperation("aten::addmm", "forward", Site(net, 12), "64×512, 512×10", 1e9, "fp32"),
        LoggedOperation("aten::mm", "backward", Site(net, 11), "784×64, 64×512", 1e11, "fp32"),
        LoggedOperation("aten::_foreach_add_", "update", Site(loop, 25), "784×512", 0.0, "fp32"),
        LoggedOperation("aten::_local_scalar_dense", "forward", Site(loop, 26), "scalar", 0.0, "fp32"),
    ]


def _step(begin: float, longer: float, link: int, *, cuda: bool) -> list[TraceEvent]:
    def host(name: str, start: float, end: float, kind: str = "operation", number: int | None = None) -> TraceEvent:
        return TraceEvent(name, kind, begin + start, begin + end, 1, number)

    def device(name: str, start: float, end: float, number: int, kind: str = "kernel") -> TraceEvent:
        return TraceEvent(name, kind, begin + longer + start, begin + longer + end, 7, link + number)

    events = [host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 0.005 + longer, "data")]
    calls = [
        ("aten::_to_copy", 0.0055, 0.007),
        ("aten::addmm", 0.0075, 0.0085),
        ("aten::addmm", 0.009, 0.0095),
        ("autograd::engine::evaluate_function: AddmmBackward0", 0.010, 0.012),
        ("aten::mm", 0.0105, 0.0115),
        ("aten::_foreach_add_", 0.0130, 0.0140),
        ("aten::_local_scalar_dense", 0.0145, 0.0195),
    ]
    events.append(host("Optimizer.step#SGD.step", longer + 0.0125, longer + 0.0142, "update"))
    events += [host(name, longer + start, longer + end) for name, start, end in calls]
    if cuda:
        for number, (_, start, _) in enumerate(calls):
            launch = host("cudaLaunchKernel", longer + start + 1e-4, longer + start + 2e-4, "call", link + number)
            events += [launch] if number != 3 else []
        events.append(host("cudaStreamSynchronize", longer + 0.0147, longer + 0.0194, "wait"))
        events += [
            device("Memcpy HtoD (Pageable -> Device)", 0.0058, 0.0069, 0, "copy"),
            device("sgemm", 0.0078, 0.0108, 1),
            device("sgemm", 0.0108, 0.0112, 2),
            device("sgemm", 0.0115, 0.0172, 4),
            device("multi_tensor_apply", 0.0172, 0.0182, 5),
            device("Memcpy DtoH (Device -> Pageable)", 0.0190, 0.0191, 6, "copy"),
        ]
    return [*events, host(MARK, longer + STEP, longer + STEP, "mark")]
