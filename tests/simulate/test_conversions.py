"""What a script may ask of torch around tensors on the simulated device."""

import pytest

from .test_running import LOOP


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("torch.autograd.set_detect_anomaly(True)\nstep()\n", "anomaly detection"),
        ("with torch.autograd.detect_anomaly():\n    step()\n", "anomaly detection"),
        (
            "from torch.profiler import ProfilerActivity as Seen, profile\n"
            "with profile(activities=[Seen.CPU, Seen.CUDA]) as seen:\n    step()\n"
            "assert seen.key_averages().table(sort_by='cuda_time_total')\n",
            "torch.profiler",
        ),
        (
            "@torch.jit.script\ndef double(x):\n    return 2 * x\n"
            "scripted = torch.jit.script(model)\nassert double(scripted(torch.randn(3, 4).cuda())).is_cuda\nstep()\n",
            "torch.jit.script",
        ),
        (
            "import tempfile\nfrom torch.utils.tensorboard import SummaryWriter\n"
            "net, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).cuda(), torch.randn(2, 1, 8, 8).cuda()\n"
            "SummaryWriter(tempfile.mkdtemp()).add_graph(net, x)\n"
            "assert torch.jit.trace(net, x)(x).is_cuda and torch.jit.trace(nn.ReLU(), torch.ones(2)).graph\nstep()\n",
            "torch.jit.trace",
        ),
    ],
)
def test_what_looks_at_values_or_at_the_device_is_left_out_with_a_note(run, body: str, note: str) -> None:
    ran = run(LOOP + body)
    assert (ran.result.error, ran.result.completed) == (None, 1)
    assert any(each.startswith(note) for each in ran.result.notes)
    assert "C++" not in ran.err
    assert "frame #" not in ran.err


WORKS = (
    "print(torch.tensor([step().detach(), step().detach()]).shape == (2,))\n",
    "print(nn.utils.weight_norm(nn.Conv1d(4, 4, 3)).cuda()(torch.randn(2, 4, 8).cuda()).is_cuda)\n",
    "print(model.share_memory() is model and model.weight.is_cuda)\n",
    "out, var = model(torch.randn(3, 4).cuda()), torch.rand(3, 2).cuda()\n"
    "print(nn.GaussianNLLLoss()(out, out.detach(), var).is_cuda)\n",
    "print(bool((model.weight < 0).any()))\n",  # the script's own question has the answer that it had
)


def test_what_a_real_gpu_does_works(run) -> None:
    ran = run(LOOP + "".join(WORKS))
    assert (ran.out, ran.result.error) == ("True\n" * len(WORKS), None)


@pytest.mark.parametrize(
    "line",
    [
        "nn.Embedding(20, 8, sparse=True).cuda()(torch.zeros(3).long().cuda()).sum().backward()",
        "torch.eye(3).to_sparse().cuda()",
    ],
)
def test_sparse_tensors_are_named_as_what_is_not_simulated(run, line: str) -> None:
    ran = run(LOOP + f"{line}  # here\n")
    (found,) = ran.result.findings
    assert (ran.result.status, found.code, found.line) == ("not-simulated", "not-simulated", ran.line("# here"))
    assert "sparse tensors are not simulated" in found.message
    assert "sparse=False" in found.fix


def test_data_parallel_runs_on_the_first(run) -> None:
    body = """
import torch
from torch import nn
model = nn.DataParallel(nn.Linear(4, 2).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(6, 4)).mean().backward()
    optimizer.step()
"""
    ran = run(body)
    assert (ran.result.error, ran.result.findings, ran.result.completed) == (None, (), 3)
