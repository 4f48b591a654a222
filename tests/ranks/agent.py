"""One host of a run: torchrun's agent in its own network, with one rank: `agent.py NETWORK ADDRESS MASTER SCRIPT …`.

Without the name of a network it stays in that of its parent.

The agent is the one behind `torchrun --nnodes 2 --rdzv-backend c10d --max-restarts 2`; its ranks are forks of it, which
have torch already.
"""

import ctypes
import os
import runpy
import socket
import sys
import time
from pathlib import Path

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

NEW_HOSTNAME = 0x04000000  # flags of unshare(2) and setns(2)
NEW_NETWORK = 0x40000000


def enter(network: str) -> None:
    """Be in a network namespace that `ip netns` made, under a hostname of that name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", network).open("rb") as file:
        if libc.setns(file.fileno(), NEW_NETWORK) or libc.unshare(NEW_HOSTNAME):
            raise OSError(ctypes.get_errno(), "no rights")
    socket.sethostname(network)


def rank(script: str, *arguments: str) -> None:
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    network, address, master, script, *arguments = sys.argv[1:]
    if network:
        enter(network)
    dynamic_rendezvous._delay = lambda seconds: time.sleep(0.1)  # between two looks, instead of a second
    os.environ["GLOO_SOCKET_IFNAME"] = "cable" if network else "lo"
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="hosts",
        rdzv_backend="c10d",
        rdzv_endpoint=master,
        rdzv_configs={"join_timeout": 60, "last_call_timeout": 1, "is_host": master.startswith(address)},
        max_restarts=2,
        monitor_interval=0.1,
        start_method="fork",
        local_addr=address,
    )
    elastic_launch(config, rank)(script, *arguments)


if __name__ == "__main__":
    main()
