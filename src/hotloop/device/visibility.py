"""How CUDA reads CUDA_VISIBLE_DEVICES: a list of GPUs, cut at the first entry that is not one."""

import re
from itertools import takewhile

from hotloop.device.facts import InstalledGpu


def why_hidden(visible: str, cards: tuple[InstalledGpu, ...] | None) -> str | None:
    """How this value hides every GPU; None where it may leave one.

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
