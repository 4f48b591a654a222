"""Rules about who has the GPUs: idle holders of memory, and GPUs that nobody uses."""

from collections.abc import Iterator

from hotloop.apps.top.advice.recent import Lasting, Recent
from hotloop.apps.top.advice.rule import Advice, Moment, name_of, share_of_memory
from hotloop.monitor.reading import Gpu, Process
from hotloop.printing.text import size

IDLE_FOR = 300.0  # seconds without work after which memory counts as held for nothing
IDLE_LAPSE = 2.0  # seconds of CPU that do not count while the GPU is idle, such as a notebook that saves itself
IDLE_CPU = 5.0  # percent of a core that an idle process may take: a heartbeat, a tick of the system's clock
IDLE_GPU = 1.0  # percent of utilisation of an idle GPU
BUSY_CPU = 50.0  # percent of a core of a process that accounts for the utilisation of its GPU
HELD = 256 * 2**20  # bytes that are worth speaking of; an empty CUDA context takes about as much

BESIDE_FOR = 120.0  # seconds for which one GPU must be idle beside a full one
FULL_GPU = 90.0  # percent of utilisation of a GPU that can do no more
FULL_MEMORY = 90.0  # percent of memory of a GPU that is full while it computes
WORKING_GPU = 20.0  # percent of utilisation of a GPU that computes
EMPTY_MEMORY = 5.0  # percent of memory that the driver itself may take on an idle GPU


class IdleMemory:
    """A process that holds 256 MiB of a GPU or more, and that for 5 minutes neither it nor its GPU has worked.

    A GPU that another process keeps busy tells nothing about this one; there its own CPU time has to do, for whoever
    computes must at least launch.
    """

    def __init__(self, after: float = IDLE_FOR) -> None:
        self._lasting: Lasting[tuple[int, int, float | None]] = Lasting(after, IDLE_LAPSE)

    def see(self, moment: Moment) -> Iterator[Advice]:
        there = {
            (gpu.index, process.pid, process.started): (gpu, process)
            for gpu in moment.reading.gpus
            for process in gpu.processes or ()
            if process.kind != "graphics" and (process.memory or 0) >= HELD
        }
        self._lasting.end(key for key, pair in there.items() if _works(*pair))
        idle = self._lasting.see((key for key, pair in there.items() if _idles(*pair)), moment.now)
        for key, (gpu, process) in there.items():
            if key in idle:
                yield _held_by(gpu, process, idle[key])


def _idles(gpu: Gpu, process: Process) -> bool:
    if process.cpu is None or gpu.utilisation is None or process.cpu > IDLE_CPU:
        return False
    others = (other for other in gpu.processes or () if other.pid != process.pid)
    return gpu.utilisation <= IDLE_GPU or any((other.cpu or 0.0) >= BUSY_CPU for other in others)


def _works(gpu: Gpu, process: Process) -> bool:
    return gpu.utilisation is not None and gpu.utilisation > IDLE_GPU and not _idles(gpu, process)


def _held_by(gpu: Gpu, process: Process, seconds: float) -> Advice:
    idle = f"{int(seconds // 60)} min" if seconds >= 60 else f"{seconds:.0f} s"
    fix = (
        "this program or one that it started holds it: delete what is no longer needed, then"
        " call `torch.cuda.empty_cache()`"
        if process.ours
        else f"if nobody needs it, end it (`kill {process.pid}`); of a notebook, shut the kernel down"
    )
    return Advice(
        "idle-memory",
        gpu.index,
        f"{size(process.memory)} of GPU {gpu.index} is held by {name_of(process, f'idle for {idle}')}",
        fix=fix,
    )


class UnusedGpu:
    """A GPU that is idle for 2 minutes while another one, of at most twice its memory, can do no more."""

    def __init__(self) -> None:
        self._lasting: Lasting[int] = Lasting(BESIDE_FOR)

    def see(self, moment: Moment) -> Iterator[Advice]:
        gpus = moment.reading.gpus
        full = [gpu for gpu in gpus if _is_full(gpu, moment.recent)]
        largest = max((gpu.memory_total or 0 for gpu in full), default=0)
        unused = [
            gpu.index for gpu in gpus if _is_unused(gpu, moment.recent) and (gpu.memory_total or 0) * 2 >= largest
        ]
        lasting = self._lasting.see(unused if full else (), moment.now)
        if lasting and full:
            yield _beside(sorted(lasting), full[0], moment.recent)


def _is_full(gpu: Gpu, recent: Recent) -> bool:
    utilisation = recent.mean(gpu.index, "utilisation")
    if utilisation is None:
        return False
    memory = share_of_memory(gpu)
    return utilisation >= FULL_GPU or (utilisation >= WORKING_GPU and memory is not None and memory >= FULL_MEMORY)


def _is_unused(gpu: Gpu, recent: Recent) -> bool:
    utilisation, memory = recent.mean(gpu.index, "utilisation"), share_of_memory(gpu)
    return utilisation is not None and utilisation <= IDLE_GPU and memory is not None and memory <= EMPTY_MEMORY


def _beside(idle: list[int], full: Gpu, recent: Recent) -> Advice:
    numbers = ", ".join(map(str, idle))
    which = f"GPU {numbers} is" if len(idle) == 1 else f"GPUs {numbers} are"
    utilisation, memory = recent.mean(full.index, "utilisation") or 0.0, share_of_memory(full)
    has = f"utilisation {utilisation:.0f}%" + ("" if memory is None else f", memory {memory:.0f}%")
    return Advice(
        "idle-gpu",
        idle[0] if len(idle) == 1 else None,
        f"{which} idle while GPU {full.index} is full ({has})",
        fix=f"train on several (`torchrun --nproc-per-node={len(idle) + 1} script.py`), "
        f"or start the next run there (`CUDA_VISIBLE_DEVICES={idle[0]}`)",
    )
