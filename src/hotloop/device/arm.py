"""The name of an ARM processor, of which the kernel gives only the numbers of its maker and its design."""

import re

# As the Linux tool lscpu has them (util-linux, sys-utils/lscpu-arm.c).
_MAKERS = {
    0x41: "ARM",
    0x42: "Broadcom",
    0x43: "Cavium",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x51: "Qualcomm",
    0x61: "Apple",
    0x6D: "Microsoft",
    0xC0: "Ampere",
}
_DESIGNS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD0D): "Cortex-A77",
    (0x41, 0xD0E): "Cortex-A76AE",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD44): "Cortex-X1",
    (0x41, 0xD46): "Cortex-A510",
    (0x41, 0xD47): "Cortex-A710",
    (0x41, 0xD48): "Cortex-X2",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4A): "Neoverse-E1",
    (0x41, 0xD4B): "Cortex-A78C",
    (0x41, 0xD4C): "Cortex-X1C",
    (0x41, 0xD4D): "Cortex-A715",
    (0x41, 0xD4E): "Cortex-X3",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD80): "Cortex-A520",
    (0x41, 0xD81): "Cortex-A720",
    (0x41, 0xD82): "Cortex-X4",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x43, 0x0AF): "ThunderX2",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "Kunpeng-920",
    (0x4E, 0x003): "Denver 2",
    (0x4E, 0x004): "Carmel",
    (0x51, 0x001): "Oryon",
    (0xC0, 0xAC3): "One",
    (0xC0, 0xAC4): "One A",
}
_NUMBER = re.compile(r"^CPU (?:implementer|part)\s*:\s*(0x[0-9a-f]{1,4})$", re.MULTILINE)


def arm_name(cpuinfo: str) -> str | None:
    """The processor by its maker and designs; None where `/proc/cpuinfo` is not that of an ARM processor.

    >>> arm_name("CPU implementer : 0x41\\nCPU architecture: 8\\nCPU part : 0xd0c\\n")
    'ARM Neoverse-N1'
    """
    told = [int(number, 16) for number in _NUMBER.findall(cpuinfo)]
    cores = dict.fromkeys(zip(told[::2], told[1::2], strict=False))  # each core tells its maker, then its design
    if not cores:
        return None
    maker = next(iter(cores))[0]
    designs = [_DESIGNS.get(core, f"part {core[1]:#x}") for core in cores]  # a phone or a board may have several
    return f"{_MAKERS.get(maker, f'maker {maker:#x}')} {' and '.join(designs)}"
