"""Why a kind of device cannot be used on this machine, each cause with its fix. No torch here."""

import re
from collections.abc import Iterator
from itertools import takewhile

from hotloop.device.facts import Cause, InstalledGpu, MachineFacts, VisibleGpu, dotted
from hotloop.printing.text import shorten

SELECTOR = "https://pytorch.org/get-started/locally/"
DRIVERS = "https://www.nvidia.com/drivers"
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}  # the first driver for each major CUDA, on Linux
GPU_CONTAINER = "`docker run --gpus all ...` (Podman: `podman run --device nvidia.com/gpu=all ...`)"


def why_no_cuda(facts: MachineFacts) -> tuple[Cause, ...]:
    """The causes, the most fundamental first; none where a CUDA GPU can be used.

    >>> [cause.code for cause in why_no_cuda(MachineFacts(hardware=(), torch_version="2.13.0+cpu"))]
    ['no-hardware', 'cpu-build']
    """
    if facts.usable:
        return ()
    if facts.gpus:  # torch sees them, so all that comes before is in order
        return tuple(unsupported(facts, gpu) for gpu in facts.gpus)
    if facts.torch_hip is not None:
        return (_rocm(facts),)
    return tuple(_causes(facts)) or (_unknown(facts),)


def _causes(facts: MachineFacts) -> Iterator[Cause]:
    bare = facts.hardware == () and facts.driver is None and not facts.nodes
    if bare:
        yield _no_hardware(facts)
    if facts.torch_cuda is None:
        yield _cpu_build(facts, bare)
    if bare:  # without a GPU there is no driver to judge
        return
    if facts.driver_mismatch:
        yield _driver_mismatch(facts)
    elif facts.driver is None:
        yield _no_driver(facts)
    elif _too_old(facts):
        yield _old_driver(facts)
    if facts.system == "Linux" and facts.variant is None and facts.driver is not None:
        yield from _nodes(facts)
    yield from _hidden(facts)


def _no_hardware(facts: MachineFacts) -> Cause:
    if facts.system == "Darwin":
        return Cause("no-hardware", "macOS has no CUDA", "use mps, the GPU of Macs, or a machine with an NVIDIA GPU")
    return Cause(
        "no-hardware",
        "this machine has no NVIDIA GPU",
        "the CPU is fine to learn on; for speed, use a machine with an NVIDIA GPU",
    )


def _cpu_build(facts: MachineFacts, bare: bool) -> Cause:
    what = f"this torch ({facts.torch_version or 'version unknown'}) is built without CUDA"
    install = (
        "install one with CUDA: `pip install --force-reinstall torch`"
        if facts.system == "Linux"
        else f"install one with CUDA, with the command from {SELECTOR}"
    )
    if facts.system == "Darwin":
        return Cause("cpu-build", what, "nothing to do: no build for macOS has CUDA")
    if bare:
        return Cause(
            "cpu-build", f"{what}, which does not matter without an NVIDIA GPU", f"once there is one, {install}"
        )
    return Cause("cpu-build", what, install)


def _no_driver(facts: MachineFacts) -> Cause:
    seen = f" for {shorten([card.name for card in facts.hardware])}" if facts.hardware else ""
    what = f"no NVIDIA driver{seen} is loaded"
    if facts.hardware is None:
        what += ", and whether there is an NVIDIA GPU cannot be told from here"
    if facts.variant == "wsl":
        fix = f"install the NVIDIA driver in Windows ({DRIVERS}), none in Linux, then run `wsl --shutdown`"
    elif facts.in_container:
        fix = f"install the driver on the host, then start the container with {GPU_CONTAINER}"
    elif facts.system == "Linux":
        fix = f"install the driver (on Ubuntu: `sudo ubuntu-drivers install`, else {DRIVERS}), then restart"
    else:
        fix = f"install the driver from {DRIVERS}, then restart"
    return Cause("no-driver", what, fix)


def _driver_mismatch(facts: MachineFacts) -> Cause:
    loaded = f" ({facts.driver} is loaded)" if facts.driver else ""
    return Cause(
        "driver-mismatch",
        f"the NVIDIA driver was updated, and the old one is still running{loaded}",
        "restart the machine; in a container, restart the container too",
    )


def _too_old(facts: MachineFacts) -> bool:
    """Whether the driver is older than the build's CUDA; no where it cannot be told."""
    build = _numbers(facts.torch_cuda)
    if not build:
        return False
    if facts.driver_cuda is not None:
        return facts.driver_cuda[0] < build[0]
    oldest = OLDEST_DRIVER.get(build[0])
    driver = _numbers(facts.driver)
    return oldest is not None and bool(driver) and driver[:2] < oldest


def _old_driver(facts: MachineFacts) -> Cause:
    oldest = OLDEST_DRIVER.get(_numbers(facts.torch_cuda)[0])
    needs = f"driver {oldest[0]}.{oldest[1]} or newer" if oldest else "a newer driver"
    runs = f", which runs CUDA {dotted(facts.driver_cuda)} at most" if facts.driver_cuda else ""
    older = f"CUDA {facts.driver_cuda[0]}" if facts.driver_cuda else "an older CUDA"
    return Cause(
        "old-driver",
        f"this torch is built for CUDA {facts.torch_cuda}, which needs {needs}; "
        f"the driver here is {facts.driver}{runs}",
        f"install {needs} ({DRIVERS}), or a build of torch for {older} ({SELECTOR})",
    )


def _nodes(facts: MachineFacts) -> Iterator[Cause]:
    """The device files: missing ones first, then those that may not be opened."""
    there = dict(facts.nodes)
    missing = [node for node in ("/dev/nvidiactl", "/dev/nvidia-uvm") if node not in there]
    if not any(re.fullmatch(r"/dev/nvidia\d+", node) for node in there):
        missing.insert(0, "/dev/nvidia0")
    denied = [node for node, state in facts.nodes if state == "denied"]
    if missing:
        what = f"the NVIDIA driver {facts.driver} is loaded, but {shorten(missing)}"
        what += " are missing" if len(missing) > 1 else " is missing"
        if facts.in_container:
            yield Cause("no-nodes", f"{what} in this container", f"start the container with {GPU_CONTAINER}")
        else:
            yield Cause("no-nodes", what, "run `sudo nvidia-modprobe -u -c 0`")
    if denied:
        yield Cause(
            "no-permission",
            f"this user may not open {shorten(denied)}",
            "see who may with `ls -l /dev/nvidia*`, join that group, such as `sudo usermod -aG video $USER`, "
            "and log in again",
        )


def _hidden(facts: MachineFacts) -> Iterator[Cause]:
    what = None if facts.visible is None else why_hidden(facts.visible, facts.hardware)
    if what is None:
        return
    if facts.hardware:
        last = len(facts.hardware) - 1
        what += f" (this machine has {'GPU 0' if last == 0 else f'GPUs 0 to {last}'})"
    unset = "$Env:CUDA_VISIBLE_DEVICES = $null" if facts.system == "Windows" else "unset CUDA_VISIBLE_DEVICES"
    yield Cause("hidden", what, f"run `{unset}`, and look where it is set")


def why_hidden(visible: str, cards: tuple[InstalledGpu, ...] | None) -> str | None:
    """How this value of CUDA_VISIBLE_DEVICES hides every GPU; None where it may leave one.

    CUDA reads it as a list of GPUs, and cuts it at the first entry that is not one.

    >>> why_hidden("-1,0", (InstalledGpu("NVIDIA T4"),))
    "CUDA_VISIBLE_DEVICES='-1,0' hides every GPU, since CUDA reads it up to the first entry that names none, '-1'"
    >>> why_hidden("0,7", (InstalledGpu("NVIDIA T4"),)) is None
    True
    """
    entries = [entry.strip() for entry in visible.split(",")]
    what = f"CUDA_VISIBLE_DEVICES='{visible}' hides every GPU"
    if visible.strip() in ("", "-1"):
        return what
    if not _names_a_gpu(entries[0], cards):
        return f"{what}, since CUDA reads it up to the first entry that names none, '{entries[0]}'"
    valid = list(takewhile(lambda entry: _names_a_gpu(entry, cards), entries))
    if len(set(valid)) < len(valid):
        return f"{what}, since it names one of them twice"
    return None


def _names_a_gpu(entry: str, cards: tuple[InstalledGpu, ...] | None) -> bool:
    """Whether the entry may name a GPU; yes where the machine does not tell which there are."""
    if entry.startswith("MIG-"):
        return True
    if entry.startswith("GPU-"):  # the beginning of a UUID is enough
        uuids = [card.uuid for card in cards or ()]
        return not uuids or None in uuids or any(uuid.startswith(entry) for uuid in uuids if uuid)
    number = re.match(r"\+?(\d+)", entry)  # CUDA reads "1st" as 1
    return number is not None and (not cards or int(number[1]) < len(cards))


def unsupported(facts: MachineFacts, gpu: VisibleGpu) -> Cause:
    """Why this build of torch holds no code for a GPU that it sees."""
    if facts.torch_hip is not None:
        has, kind = shorten(list(facts.arch_list)), gpu.gfx or "unknown"
        fix = f"install a build of torch for it ({SELECTOR})"
        return Cause("unsupported-arch", f"{gpu} is a {kind}, and this torch holds code for {has} only", fix)
    oldest = min((numbers for arch in facts.arch_list if (numbers := _arch(arch))), default=gpu.capability)
    age, has = ("an older", "still has") if gpu.capability < oldest else ("a newer", "has")
    sm = "sm_{}{}".format(*gpu.capability)
    return Cause(
        "unsupported-arch",
        f"{gpu} has compute capability {dotted(gpu.capability)}, and this torch "
        f"({facts.torch_version}) holds code for {shorten(list(facts.arch_list), 12)} only",
        f"install {age} build of torch, one that {has} {sm} ({SELECTOR})",
    )


def _rocm(facts: MachineFacts) -> Cause:
    said = f"; torch says: {_said(facts)}" if facts.cuda_error else ""
    if facts.hardware:
        return Cause(
            "rocm-build",
            f"this torch is built for AMD GPUs (ROCm {facts.torch_hip}), and the GPU here is NVIDIA's{said}",
            f"install a build for CUDA, with the command from {SELECTOR}",
        )
    return Cause(
        "rocm-build",
        f"this torch is built for AMD GPUs (ROCm {facts.torch_hip}), and sees none{said}",
        "check that `rocminfo` lists the GPU, and that this user is in the groups render and video",
    )


def _unknown(facts: MachineFacts) -> Cause:
    said = f"torch says: {_said(facts)}" if facts.cuda_error else "torch sees no GPU, and does not say why"
    return Cause("unknown", said, "see whether `nvidia-smi` works; if it does not, restart or reinstall the driver")


def why_no_mps(facts: MachineFacts) -> Cause | None:
    """Why Apple's GPU cannot be used; None where it can."""
    if facts.mps_available:
        return None
    if facts.system != "Darwin":
        return Cause("not-macos", f"mps is the GPU of Macs, and this is {facts.system}", "choose another device")
    if not facts.mps_built:
        return Cause("no-mps-build", "this torch is built without MPS", f"install the build from {SELECTOR}")
    if facts.macos is not None and facts.macos < (12, 3):
        return Cause("old-macos", f"MPS needs macOS 12.3, and this is {dotted(facts.macos)}", "update macOS")
    return Cause("no-metal", "macOS gives torch no Metal GPU", "run it on the Mac itself, not in a virtual machine")


def why_none(facts: MachineFacts, kind: str, called: str) -> Cause | None:
    """Why no accelerator of another kind can be used; None where one can."""
    if any(device.startswith(f"{kind}:") for device, _ in facts.accelerators):
        return None
    if kind == "xpu" and not facts.xpu_built:
        fix = f"on a machine with an Intel GPU, install the build for it ({SELECTOR})"
        return Cause("no-xpu-build", "this torch is built without support for Intel GPUs", fix)
    return Cause(f"no-{kind}", f"torch sees no {called}", f"check that the {called} driver is installed")


def _said(facts: MachineFacts) -> str:
    return " ".join((facts.cuda_error or "").split())


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version or ""))


def _arch(arch: str) -> tuple[int, int] | None:
    numbers = _numbers(arch)
    return divmod(numbers[0], 10) if numbers else None
