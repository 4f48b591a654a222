"""Launching without a launch: the torchrun line of a request, ports and hosts, and the files for clusters."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.errors import BadArgument, DeviceUnavailable
from hotloop.scripts import rank_worker
from hotloop.scripts.torchrun import Endpoint, LaunchRequest, line_for, wait_for

from .ranks.conftest import free_port
from .warm import HOTLOOP, Warm, stand_in

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"
MASTER = Endpoint("node-0", 29500)
SETTLED = ("OMP_NUM_THREADS",)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_") or name in SETTLED]:
        monkeypatch.delenv(name)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(number: int) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)

    return pretend


def request(**settings: Any) -> LaunchRequest:
    return LaunchRequest("project.train", module=True, **settings)


def options(**settings: Any) -> tuple[str, ...]:
    return line_for(request(**settings)).options


def test_one_process_for_each_gpu(gpus: Any) -> None:
    gpus(4)
    line = line_for(request(arguments=("--name", "two words")))
    assert line.options == ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4")
    assert line.remarks == ()
    assert str(line).endswith("torchrun " + " ".join(line.options) + " -m project.train --name 'two words'")
    assert "--nproc-per-node=2" in options(gpus=2)
    assert "--nproc-per-node=6" in options(processes=6)
    with pytest.raises(DeviceUnavailable, match="torch sees 4 GPUs here") as told:
        line_for(request(gpus=5))
    assert "--gpus 4" in str(told.value.fix)


def test_without_a_gpu_one_process_and_it_says_so(gpus: Any) -> None:
    gpus(0)
    line = line_for(request())
    assert "--nproc-per-node=1" in line.options
    assert "no GPU that torch can use: 1 process on the CPU" in line.remarks[0]
    assert line_for(request(processes=2)).remarks == ()
    with pytest.raises(DeviceUnavailable, match="torch sees no GPU here") as told:
        line_for(request(gpus=2))
    assert "hotloop launch --processes 2" in str(told.value.fix)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities here")
def test_threads_are_the_cores_divided_by_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert line_for(request(processes=4)).environment == {"OMP_NUM_THREADS": "3"}
    assert line_for(request(processes=40)).environment == {"OMP_NUM_THREADS": "1"}
    assert str(line_for(request(processes=4))).startswith("OMP_NUM_THREADS=3 torchrun ")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert line_for(request(processes=4)).environment == {}


def test_nodes_agree_on_a_rendezvous_and_node_0_hosts_it() -> None:
    first, second = (options(processes=1, nodes="2", node_rank=rank, master=MASTER) for rank in (0, 1))
    assert "--rdzv-endpoint=node-0:29500" in first
    assert "--rdzv-conf=is_host=1,join_timeout=300,read_timeout=300" in first
    assert "--rdzv-conf=is_host=0,join_timeout=300,read_timeout=300" in second
    assert [each for each in first if "conf" not in each] == [each for each in second if "conf" not in each]
    alike = options(processes=1, nodes="1:4", master=MASTER, join_timeout=60.0)
    assert {"--nnodes=1:4", "--rdzv-conf=join_timeout=60,read_timeout=60", "--rdzv-backend=c10d"} <= set(alike)


def test_options_of_torchrun_pass_and_replace_ours() -> None:
    assert options(processes=1, passed=("--max-restarts", "3"))[-2:] == ("--max-restarts", "3")
    assert options(passed=("--nproc_per_node=2", "--standalone")) == ("--nproc_per_node=2", "--standalone")
    ours = options(processes=1, nodes="2", master=MASTER, passed=("--rdzv-id", "mine"))
    assert ours[-2:] == ("--rdzv-id", "mine"), "the last one counts"


def test_variables_of_an_operator_are_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NNODES": "2", "NPROC_PER_NODE": "4", "MASTER_ADDR": "job-0", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    line = line_for(request())
    assert line.options == ()
    assert "PET_MASTER_ADDR, PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE" in line.remarks[0]
    assert "--nproc-per-node=1" in options(processes=1)


@pytest.mark.parametrize("words", ["", ":29500", "node:port", "node:0", "node:70000"])
def test_what_is_no_endpoint(words: str) -> None:
    with pytest.raises(BadArgument, match="is not a host and a port"):
        Endpoint.parse(words)


def test_node_0_is_waited_for() -> None:
    port = free_port()
    late: list[socket.socket] = []
    timer = threading.Timer(1.2, lambda: late.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    try:
        wait_for(Endpoint("127.0.0.1", port), 20.0)
    finally:
        timer.join()
    (server,) = late
    server.close()


WORKER = rank_worker.__file__
OWN_HOOK = "import sys\nsys.excepthook = lambda kind, error, trace: print('mine:', error, trace.tb_lineno)\n1 / 0\n"


def test_a_rank_tells_its_error_in_the_way_that_suits_it(tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "hook.py").write_text(OWN_HOOK)
    (tmp_path / "syntax.py").write_text("def f(:\n")

    def told(name: str, kept: str) -> tuple[int, str, str]:
        file = tmp_path / kept / "1" / "error.json"
        file.parent.mkdir(parents=True)
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(file)}
        done = warm.run(WORKER, name, cwd=tmp_path, environment={**os.environ, **ranks})
        assert json.loads(file.read_text())["message"]["message"].startswith(kept)
        return done.returncode, done.stdout, done.stderr

    who = f"\n[rank 1 of 2 on {socket.gethostname()}] failed:\n"
    assert told("hook.py", "ZeroDivisionError: division by zero") == (1, "mine: division by zero 3\n", who)
    code, _, err = told("syntax.py", "SyntaxError: invalid syntax")
    assert (code, err.startswith(who)) == (1, True)
    assert err.endswith("SyntaxError: invalid syntax\n")
    assert "rank_worker.py" not in err


def test_a_verb_of_hotloop_tells_its_mistake_without_a_traceback(tmp_path: Path, warm: Warm) -> None:
    command = (*HOTLOOP, "sprites", "generate", "--model", "missing.safetensors")
    done = warm.run(WORKER, *command, cwd=tmp_path, environment={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 2
    assert "failed:\nhotloop: there is no file missing.safetensors\n  fix: " in done.stderr
    assert "Traceback" not in done.stderr


# The files for clusters


def test_the_training_goes_on_where_it_ended(tmp_path: Path, warm: Warm) -> None:
    """As one process; with several it is that of `hotloop.Loop`, which has tests of its own."""
    alone = {**os.environ, "HOTLOOP_DEVICE": "cpu"}
    for epochs in ("1", "2"):
        settings = ("--items", "1024", "--save", "here", "--epochs", epochs)
        done = warm.run(CLUSTERS / "train.py", *settings, cwd=tmp_path, environment=alone)
        assert done.returncode == 0, done.stderr
    assert "resuming from step 4" in done.stderr
    assert list((tmp_path / "here").glob("step-*8"))


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("[!_]*.*")), ids=lambda file: file.name)
def test_every_file_is_shown_on_a_page(file: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "clusters").glob("*.md")]
    assert any(f'--8<-- "examples/clusters/{file.name}"' in page for page in pages)
    assert all("## What was run" in page for page in pages)


TINY = """\
import json, os, signal, sys, time
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps([{name: os.environ[name] for name in names}, sys.argv]))
if os.environ.get("UNTIL_TERM"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    Path(f"ready-{os.environ['RANK']}").touch()
    time.sleep(60)
"""


@pytest.fixture
def node(tmp_path: Path, warm: Warm) -> Path:
    """A folder with a script, and a `hotloop` that has torch already."""
    (tmp_path / "train.py").write_text(TINY)
    (tmp_path / "bin").mkdir()
    command(tmp_path, "hotloop", f'#!/bin/sh\nexec {stand_in(tmp_path, warm.server)} -m hotloop "$@"\n')
    return tmp_path


def command(folder: Path, name: str, text: str) -> None:
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def on_path(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a node, which has no GPU."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **more}


def test_the_pods_of_the_job_find_one_another_and_join(node: Path) -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    (line,) = container["args"]
    assert f"--nodes {spec['completions']} " in line
    assert f"--master {name}-0.{pod['subdomain']}:" in line
    assert '--node-rank "$JOB_COMPLETION_INDEX"' in line
    assert line.startswith("exec ")  # or the shell would keep SIGTERM for itself
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert pod["restartPolicy"] == "Never"

    line = line.replace("hotloop-0.hotloop:29500", f"127.0.0.1:{free_port()}")
    pods = [
        subprocess.Popen([*container["command"], line], cwd=node, env=on_path(node, JOB_COMPLETION_INDEX=index))
        for index in ("1", "0")
    ]
    assert [each.wait(90) for each in pods] == [0, 0]
    assert sorted(file.name for file in node.glob("rank-*")) == ["rank-0.json", "rank-1.json"]
    assert '"/runs/a"]' in (node / "rank-1.json").read_text()


FAKES = {
    "srun": """\
#!/bin/bash
# Two "nodes", on this one; options of srun itself come first.
while [[ $1 == --* ]]; do shift; done
"$@" & a=$!
"$@" & b=$!
echo $a $b > pids
wait $a; first=$?
wait $b; second=$?
exit $(( first > second ? first : second ))
""",
    "scontrol": """\
#!/bin/bash
if [ "$1" = show ]; then printf 'localhost\\nlocalhost\\n'; else echo "$@" >> queue; fi
""",
    "scancel": '#!/bin/bash\n[ "$1" = --signal=TERM ] && kill -TERM $(cat pids)\n',
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_the_slurm_job_joins_its_nodes_saves_before_the_end_and_goes_back_into_the_queue(node: Path) -> None:
    for name, text in FAKES.items():
        command(node, name, text)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    shell = subprocess.Popen(
        ["bash", str(CLUSTERS / "slurm.sbatch"), "train.py", "--save", "here"],  # noqa: S607
        cwd=node,
        env=on_path(node, UNTIL_TERM="1", **slurm),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while len(list(node.glob("ready-*"))) < 2 and time.monotonic() < end and shell.poll() is None:
            time.sleep(0.1)
        assert not (node / "queue").exists()
        shell.send_signal(signal.SIGUSR1)
        said = shell.communicate(timeout=60)[1]
    finally:
        shell.kill()
    assert shell.returncode in (130, 128 + signal.SIGTERM), said
    assert "hotloop: stopped by SIGTERM\n" in said
    assert sorted(file.name for file in node.glob("rank-*")) == ["rank-0.json", "rank-1.json"], said
    assert '["train.py", "--save", "here"]' in (node / "rank-0.json").read_text()
    assert (node / "queue").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
