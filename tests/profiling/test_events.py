"""Events as they come out of a trace of PyTorch's profiler."""

from hotloop.profiling.trace import events_in


def row(name: str, category: str, start: float, duration: float, thread: object = 1, **details: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": details}


def kinds(*rows: dict) -> dict[str, str]:
    return {event.name: event.kind for event in events_in({"traceEvents": list(rows)})}


def test_every_kind_is_told_apart() -> None:
    assert kinds(
        row("hotloop.step", "user_annotation", 0, 1),
        row("hotloop.data", "user_annotation", 0, 1),
        row("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", 0, 1),
        row("Optimizer.step#Adam.step", "user_annotation", 0, 1),
        row("mine", "user_annotation", 0, 1),
        row("aten::mm", "cpu_op", 0, 1),
        row("gloo:all_reduce", "cpu_op", 0, 1),
        row("cudaLaunchKernel", "cuda_runtime", 0, 1, correlation=1),
        row("cuLaunchKernelEx", "cuda_driver", 0, 1, correlation=2),
        row("cudaStreamSynchronize", "cuda_runtime", 0, 1),
        row("cudaDeviceSynchronize", "cuda_runtime", 0, 1),
        row("cudaStreamWaitEvent", "cuda_runtime", 0, 1),
        row("volta_sgemm", "kernel", 0, 1, 7, correlation=1),
        row("ncclDevKernel_AllReduce", "kernel", 0, 1, 7),
        row("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 0, 1, 7),
        row("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 0, 1, 7),
        row("Memset (Device)", "gpu_memset", 0, 1, 7),
        row("the same on the GPU", "gpu_user_annotation", 0, 1, 7),
    ) == {
        "hotloop.step": "mark",
        "hotloop.data": "data",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "data",
        "Optimizer.step#Adam.step": "update",
        "aten::mm": "operation",
        "gloo:all_reduce": "talk",
        "cudaLaunchKernel": "call",
        "cuLaunchKernelEx": "call",
        "cudaStreamSynchronize": "wait",
        "cudaDeviceSynchronize": "wait",
        "cudaStreamWaitEvent": "call",
        "volta_sgemm": "kernel",
        "ncclDevKernel_AllReduce": "communication",
        "Memcpy HtoD (Pinned -> Device)": "copy",
        "Memcpy DtoD (Device -> Device)": "kernel",
        "Memset (Device)": "kernel",
    }


def test_a_copy_of_memory_that_is_not_pinned_makes_the_host_wait() -> None:
    copies = [
        row("first", "cuda_runtime", 0, 9, correlation=1),
        row("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 5, 1, 7, correlation=1),
        row("second", "cuda_runtime", 10, 1, correlation=2),
        row("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 15, 1, 7, correlation=2),
    ]
    found = kinds(*copies)
    assert (found["first"], found["second"]) == ("wait", "call")


def test_seconds_order_and_what_is_no_event() -> None:
    flow = {"ph": "s", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "ts": 1}
    rows = [row("inner", "cpu_op", 2e6, 1e6), row("outer", "cpu_op", 2e6, 3e6), row("first", "cpu_op", 1e6, 0), flow]
    found = events_in({"traceEvents": rows})
    assert [(e.name, e.start, e.end) for e in found] == [("first", 1, 1), ("outer", 2, 5), ("inner", 2, 3)]
    assert events_in({}) == []


def test_a_cuda_graph_is_one_stretch_of_its_stream() -> None:
    rows = [
        row("cudaGraphLaunch", "cuda_runtime", 0, 5, correlation=7),
        row("cudaLaunchKernel", "cuda_runtime", 5, 1, correlation=8),
        row("sgemm", "kernel", 3, 10, 7, correlation=7),
        row("Memset (Unknown)", "gpu_memset", 15, 1, 7, correlation=7),
        row("relu", "kernel", 17, 3, 7, correlation=7),
        row("sgemm", "kernel", 25, 10, 7, correlation=8),
        row("cudaGraphLaunch", "cuda_runtime", 40, 5, correlation=9),
    ]
    replays = [event for event in events_in({"traceEvents": rows}) if event.kind == "replay"]
    assert [(round(e.start * 1e6), round(e.end * 1e6), e.thread, e.correlation) for e in replays] == [(3, 20, 7, 7)]
