"""Compares the answers with the report."""

from collections.abc import Iterator

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("cpu",)
USED, TOTAL, MINE, NOTEBOOK, DESKTOP = 21504, 40960, 15360, 6000, 144


def check(ran: Ran) -> Iterator[CheckVerdict]:
    free = ran["free_mib"]
    hints = {
        TOTAL: "40960 is the whole memory of the GPU: what is used must be taken off",
        TOTAL - MINE: "only your own process was taken off: the others hold memory too",
        1: "99% is GPU-Util, the share of time in which a kernel ran; it says nothing about memory",
    }
    hint = hints.get(free, "the column Memory-Usage is used / total: what is free is total minus used")
    yield CheckVerdict("`free_mib` is what is free", free == TOTAL - USED, hint)

    others = ran["others_mib"]
    hints = {
        USED: "21504 is what all hold together, your training included",
        NOTEBOOK: "the desktop (type G) holds memory of this GPU too",
    }
    hint = hints.get(others, "add up the rows of all processes but PID 7001")
    yield CheckVerdict("`others_mib` is what others hold", others == NOTEBOOK + DESKTOP, hint)

    asked = ran["ask_about"]
    hints = {
        1201: "the desktop holds 144 MiB, which hardly helps. A notebook that nobody uses holds far more",
        7001: "that is your own training",
    }
    hint = hints.get(asked, "which process besides yours holds the most?")
    yield CheckVerdict("`ask_about` is the process that would help most", asked == 3318, hint)
