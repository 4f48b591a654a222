"""Launching without a launch: the torchrun line of a request, ports and hosts, and the files for clusters."""

import json
import os
import py_compile
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.errors import BadArgument, DeviceUnavailable
from hotloop.launch.reach import Endpoint, PortTaken, Unreachable, is_here, must_be_free, wait_for
from hotloop.launch.torchrun import LaunchRequest, line_for

from .warm import Warm, stand_in

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


def test_one_machine_with_all_its_gpus(gpus: Any) -> None:
    gpus(4)
    line = line_for(request(arguments=("--name", "two words")))
    assert line.options == ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4")
    assert line.remarks == ()
    assert str(line).endswith("torchrun " + " ".join(line.options) + " -m project.train --name 'two words'")
    assert "--nproc-per-node=2" in options(gpus=2)
    assert "--nproc-per-node=6" in options(processes=6)


def test_without_a_gpu_one_process_and_it_says_so(gpus: Any) -> None:
    gpus(0)
    line = line_for(request())
    assert "--nproc-per-node=1" in line.options
    assert "no GPU that torch can use: 1 process on the CPU" in line.remarks[0]
    assert line_for(request(processes=2)).remarks == ()


def test_more_gpus_than_there_are(gpus: Any) -> None:
    gpus(2)
    with pytest.raises(DeviceUnavailable, match="torch sees 2 GPUs here") as told:
        line_for(request(gpus=3))
    assert "--gpus 2" in str(told.value.fix)
    gpus(0)
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
    assert "--rdzv-conf=is_host=1,join_timeout=300" in first
    assert "--rdzv-conf=is_host=0,join_timeout=300" in second
    assert [each for each in first if "conf" not in each] == [each for each in second if "conf" not in each]
    alike = options(processes=1, nodes="1:4", rendezvous=MASTER, join_timeout=60.0)
    assert {"--nnodes=1:4", "--rdzv-conf=join_timeout=60", "--rdzv-backend=c10d"} <= set(alike)


def test_options_of_torchrun_pass_and_replace_ours() -> None:
    assert options(processes=1, passed=("--max-restarts", "3"))[-2:] == ("--max-restarts", "3")
    assert options(passed=("--nproc_per_node=2", "--standalone")) == ("--nproc_per_node=2", "--standalone")
    ours = options(processes=1, nodes="2", rendezvous=MASTER, passed=("--rdzv-id", "mine"))
    assert [each for each in ours if "rdzv-id" in each] == ["--rdzv-id"]


def test_variables_of_an_operator_are_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NNODES": "2", "NPROC_PER_NODE": "4", "MASTER_ADDR": "job-0", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    line = line_for(request())
    assert line.options == ()
    assert "PET_MASTER_ADDR, PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE" in line.remarks[0]
    assert "--nproc-per-node=1" in options(processes=1)


MISTAKES = {
    "no process": ({"processes": 0}, "--processes 0"),
    "no GPU": ({"gpus": 0}, "--gpus 0"),
    "both": ({"gpus": 1, "processes": 1}, "--gpus and --processes"),
    "two places": ({"master": MASTER, "node_rank": 0, "rendezvous": MASTER}, "--master and --rendezvous"),
    "no number": ({"master": MASTER, "nodes": "2"}, "--node-rank is missing"),
    "no master": ({"node_rank": 1, "nodes": "2"}, "--master is missing"),
    "nowhere to meet": ({"nodes": "2"}, "without a place where they meet"),
    "one too many": ({"node_rank": 2, "nodes": "2", "master": MASTER}, "--node-rank 2 of 2 nodes"),
    "no number of nodes": ({"nodes": "two"}, "--nodes 'two'"),
    "a range upside down": ({"nodes": "4:2", "rendezvous": MASTER}, "--nodes '4:2'"),
    "said twice": ({"processes": 1, "passed": ("--nproc-per-node=2",)}, "--nproc-per-node"),
    "no number of restarts": ({"passed": ("--max-restarts", "x")}, "--max_restarts: invalid int value: 'x'"),
    "unknown": ({"passed": ("--max-restart=2",)}, "has an option --max-restart"),
}


@pytest.mark.parametrize(("settings", "says"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_meant_is_told_with_a_fix(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument) as told:
        line_for(request(**settings))
    assert says in str(told.value)
    assert told.value.fix


@pytest.mark.parametrize("words", ["", ":29500", "node:port", "node:0", "node:70000"])
def test_what_is_no_endpoint(words: str) -> None:
    with pytest.raises(BadArgument, match="is not a host and a port"):
        Endpoint.parse(words)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_taken_port_names_who_has_it(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(PortTaken, match=f"port {port} is taken on this host by") as told:
        must_be_free(Endpoint("127.0.0.1", port), "--master")
    assert f"--master 127.0.0.1:{port + 1}" in str(told.value.fix)
    listener.close()
    must_be_free(Endpoint("127.0.0.1", port), "--master")


def test_a_master_is_waited_for_with_a_line_now_and_then(listener: socket.socket) -> None:
    wait_for(Endpoint("127.0.0.1", listener.getsockname()[1]), 5.0, pytest.fail)  # nothing to say
    port = listener.getsockname()[1]
    listener.close()
    late: list[socket.socket] = []
    timer = threading.Timer(1.2, lambda: late.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    said: list[str] = []
    try:
        wait_for(Endpoint("127.0.0.1", port), 20.0, said.append, every=0.5)
    finally:
        timer.join()
        for server in late:
            server.close()
    assert len(said) >= 2
    assert (
        said[0]
        == f"waiting for 127.0.0.1:{port}, 0 s of 20.00 s: the host answers, but nothing listens on that port yet"
    )


def test_a_master_that_is_not_there_is_told_in_time() -> None:
    begun = time.monotonic()
    with pytest.raises(Unreachable, match="did not answer within 500 ms: no address is known for") as told:
        wait_for(Endpoint("nowhere.invalid"), 0.5, lambda _: None)
    assert time.monotonic() - begun < 15
    assert "--join-timeout" in str(told.value.fix)


def test_this_machine_is_known() -> None:
    assert is_here("localhost")
    assert not is_here("192.0.2.1")  # kept for documentation
    assert not is_here("nowhere.invalid")


RANK = "import sys\nfrom hotloop.launch.worker import main\nmain(sys.argv[1:])\n"
OWN_HOOK = "import sys\nsys.excepthook = lambda kind, error, trace: print('mine:', error, trace.tb_lineno)\n1 / 0\n"


def test_a_rank_tells_its_error_in_the_way_that_suits_it(tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "hook.py").write_text(OWN_HOOK)
    (tmp_path / "syntax.py").write_text("def f(:\n")

    def told(name: str, kept: str) -> tuple[int, str, str]:
        file = tmp_path / kept / "1" / "error.json"
        file.parent.mkdir(parents=True)
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(file)}
        done = warm.run(tmp_path / "rank.py", name, cwd=tmp_path, environment={**os.environ, **ranks})
        assert json.loads(file.read_text())["message"]["message"].startswith(kept)
        return done.returncode, done.stdout, done.stderr

    who = f"\n[rank 1 of 2 on {socket.gethostname()}] failed:\n"
    assert told("hook.py", "ZeroDivisionError: division by zero") == (1, "mine: division by zero 3\n", who)
    code, _, err = told("syntax.py", "SyntaxError: invalid syntax")
    assert (code, err.startswith(who)) == (1, True)
    assert err.endswith("SyntaxError: invalid syntax\n")
    assert "worker.py" not in err


def test_a_verb_of_hotloop_tells_its_mistake_without_a_traceback(tmp_path: Path, warm: Warm) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}
    (tmp_path / "rank.py").write_text(RANK)
    command = ("-m", "hotloop", "sprites", "generate", "--model", "missing.safetensors")
    done = warm.run(tmp_path / "rank.py", *command, cwd=tmp_path, environment={**os.environ, **ranks})
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


def test_the_python_files_compile(tmp_path: Path) -> None:
    files = sorted(CLUSTERS.glob("*.py"))
    assert {file.name for file in files} == {"train.py", "ray_train.py"}
    for file in files:
        py_compile.compile(str(file), cfile=str(tmp_path / f"{file.stem}.pyc"), doraise=True)


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("[!_]*.*")), ids=lambda file: file.name)
def test_every_file_is_shown_on_a_page(file: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "clusters").glob("*.md")]
    assert any(f'--8<-- "examples/clusters/{file.name}"' in page for page in pages)
    assert all("## What was run" in page for page in pages)


def job_and_service() -> tuple[dict[str, Any], dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    return job, service


def test_the_pods_of_the_job_find_one_another() -> None:
    job, service = job_and_service()
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    (command,) = container["args"]
    assert f"--nodes {spec['completions']} " in command
    assert f"--master {name}-0.{pod['subdomain']}:" in command
    assert '--node-rank "$JOB_COMPLETION_INDEX"' in command
    assert command.startswith("exec ")  # or the shell would keep SIGTERM for itself
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert pod["restartPolicy"] == "Never"


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


def on_path(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a node: `hotloop` is there, and no GPU."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_command_of_the_container_joins_two_nodes(tmp_path: Path, warm: Warm) -> None:
    """With a `hotloop` that has torch already; the Slurm job has the one that is installed."""
    (tmp_path / "bin").mkdir()
    hotloop = tmp_path / "bin" / "hotloop"
    hotloop.write_text(f'#!/bin/sh\nexec {stand_in(tmp_path, warm.server)} -m hotloop "$@"\n')
    hotloop.chmod(0o755)
    job, _ = job_and_service()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = container["args"][0].replace("hotloop-0.hotloop:29500", f"127.0.0.1:{free_port()}")
    (tmp_path / "train.py").write_text(TINY)
    nodes = [
        subprocess.Popen(
            [*container["command"], command], cwd=tmp_path, env=on_path(tmp_path, JOB_COMPLETION_INDEX=index)
        )
        for index in ("1", "0")
    ]
    assert [node.wait(90) for node in nodes] == [0, 0]
    assert sorted(file.name for file in tmp_path.glob("rank-*")) == ["rank-0.json", "rank-1.json"]
    assert '"/runs/a"]' in (tmp_path / "rank-1.json").read_text()


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
def test_the_slurm_job_joins_its_nodes_saves_before_the_end_and_goes_back_into_the_queue(tmp_path: Path) -> None:
    if shutil.which("hotloop", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("hotloop is not installed as a command")
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TINY)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    shell = subprocess.Popen(
        ["bash", str(CLUSTERS / "slurm.sbatch"), "train.py", "--save", "here"],  # noqa: S607
        cwd=tmp_path,
        env=on_path(tmp_path, UNTIL_TERM="1", **slurm),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < end and shell.poll() is None:
            time.sleep(0.1)
        assert not (tmp_path / "queue").exists()
        shell.send_signal(signal.SIGUSR1)
        said = shell.communicate(timeout=60)[1]
    finally:
        shell.kill()
    assert shell.returncode in (130, 143), said
    assert sorted(file.name for file in tmp_path.glob("rank-*")) == ["rank-0.json", "rank-1.json"], said
    assert '["train.py", "--save", "here"]' in (tmp_path / "rank-0.json").read_text()
    assert (tmp_path / "queue").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
