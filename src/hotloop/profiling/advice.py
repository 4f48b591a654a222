"""What a profile means, in sentences: what costs time, and what to do about it. Rules over plain figures."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from hotloop.data import workers_for
from hotloop.printing.text import duration
from hotloop.profiling.profile_record import HostWait, Profile, Recommendation

NOTABLE = 0.1  # of the time: what takes less is not worth a sentence
PART_WORDS = {
    "data": "waiting for data",
    "copies": "copying",
    "waits": "waiting for the device",
    "gaps": "host-bound gaps",
    "communication": "communication",
    "compute": "compute",
}


def part_words(name: str, device: str) -> str:
    """A part of the time in words.

    >>> part_words("gaps", "cpu"), part_words("data", "cuda:0")
    ('Python between operations', 'waiting for data')
    """
    return "Python between operations" if name == "gaps" and not has_kernels(device) else PART_WORDS[name]


def has_kernels(device: str) -> bool:
    """Whether work on a device is apart from the host's, so that the host can wait for it."""
    return device.split(":", maxsplit=1)[0] not in ("cpu", "mps")


@dataclass(frozen=True)
class Loading:
    """How batches are made."""

    workers: int = 0  # processes
    batch_bytes: int = 0
    in_memory: bool = False  # whether the items are tensors in memory already


def advise(profile: Profile, loading: Loading) -> tuple[Recommendation, ...]:
    """The costliest first."""
    ranked = [advice for _, advice in sorted(_on_shares(profile, loading), key=lambda pair: -pair[0])]
    steady = [wait for wait in profile.waits if wait.calls >= 0.5 and wait.line is not None]  # in about every step
    waits = (Recommendation(_wait_words(wait, profile), _way_out(wait)) for wait in steady[:3])
    return (*ranked, *waits)


def _on_shares(profile: Profile, loading: Loading) -> Iterator[tuple[float, Recommendation]]:
    """What to say of the parts that take much of a step, with their shares."""
    shares = profile.parts.shares
    if (share := shares["data"]) >= NOTABLE:
        what = f"The loop waits {share:.0%} of its time for data."
        yield share, Recommendation(what, _quicker_data(profile, loading))
    if (share := shares["copies"]) >= NOTABLE:
        what = f"Copies between host and device take {share:.0%} of the time, and nothing is computed meanwhile."
        fix = (
            "let them run beside the computing: DataLoader(..., pin_memory=True) and .to(device, non_blocking=True), "
            "or iterate over hotloop.stream(loader, device), which copies ahead"
        )
        yield share, Recommendation(what, fix)
    if (share := shares["communication"]) >= NOTABLE:
        what = f"Communication between processes takes {share:.0%} of the time, and nothing is computed meanwhile."
        yield share, Recommendation(what, "larger batches, accumulation with no_sync(), or gradients in bf16")
    if (share := shares["gaps"] + shares["waits"]) >= 2 * NOTABLE:
        what, fix = _on_gaps(profile, share)
        if not profile.data_known:
            what += " Waiting for data is part of it, since no DataLoader was seen in these steps."
        yield share, Recommendation(what, fix)


def _on_gaps(profile: Profile, share: float) -> tuple[str, str]:
    if not has_kernels(profile.device):
        return (
            f"{share:.0%} of the time passes in Python, between operations.",
            "larger batches, or fewer and larger operations; what is done in each step beside training counts here too",
        )
    less = "torch.compile(model), or hotloop.Loop, which captures the step as a CUDA graph"
    if profile.replay_share >= NOTABLE:
        less = "several steps in one CUDA graph, as fit of hotloop.Loop does with data on the device"
    return (
        f"The device has nothing to do for {share:.0%} of the time: the host does not prepare work fast enough.",
        f"take the waits out of the step, give larger batches, or let the host do less per step: {less}",
    )


def _quicker_data(profile: Profile, loading: Loading) -> str:
    """Workers only where there are cores for them, and something for them to do."""
    if loading.in_memory:
        return (
            "the data are tensors in memory, which workers would only copy: take whole batches of them by index, on "
            "the device where they fit, as hotloop.Loop and hotloop.stream(loader, device) do"
        )
    less = "do the slow part of __getitem__ once, beforehand"
    step, waited = fmean(profile.seconds), profile.parts.shares["data"]
    number = workers_for(
        None,
        workers=loading.workers,
        batch_seconds=step,
        waited=waited,
        step_seconds=step * (1 - waited),
        batch_bytes=loading.batch_bytes,
    ).number
    if number <= loading.workers:
        return f"{less}, or keep the data on the device: hotloop.Loop does where it fits"
    if loading.workers:
        more = f"give the DataLoader num_workers={number}"
        return f"{more}; {less}; or keep the data on the device: hotloop.Loop does where it fits"
    pinned = ", pin_memory=True" if has_kernels(profile.device) else ""
    workers = f"num_workers={number}, persistent_workers=True{pinned}"
    return f"read it in processes of its own: DataLoader(..., {workers}); or {less}"


def _wait_words(wait: HostWait, profile: Profile) -> str:
    where = f"{wait.line} ({wait.what})"
    if not has_kernels(profile.device):
        return (
            f"{where} reads a value from a tensor in every step: nothing on a CPU, but on a GPU the host waits there."
        )
    return f"The host waits for the device at {where}, {duration(wait.seconds)} in a step."


def _way_out(wait: HostWait) -> str:
    if ".item()" in wait.what:
        return "keep the value on the device (total += loss.detach()) and read it once in a while, not in every step"
    if "synchronize" in wait.what:
        return "leave it out: PyTorch waits by itself where a value is needed"
    if ".cpu()" in wait.what or ".to()" in wait.what:
        return "copy without waiting, to or from pinned memory: .to(device, non_blocking=True)"
    return "avoid results whose size depends on values: multiply by the mask, or torch.where"
