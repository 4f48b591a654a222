"""Training without an optimizer of `torch.optim`, and in threads: steps are steps."""

import pytest

from hotloop.apps.simulate.cards import card

from ..thorough import some

BEGIN = """
import threading
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).cuda()
parameters = list(model.parameters())


def loss():
    return model(torch.randn(3, 8, device="cuda")).pow(2).mean()


"""
WAYS = {
    "data": "loss().backward()\nfor p in parameters:\n    p.data.add_(p.grad, alpha=-0.1)\n    p.grad = None",
    "operator": "loss().backward()\nwith torch.no_grad():\n    for p in parameters:\n        p -= 0.1 * p.grad",
    "other data": "loss().backward()\nfor p in parameters:\n    p.data = p.data - 0.1 * p.grad",
    "foreach": "loss().backward()\nwith torch.no_grad():\n"
    "    torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)",
    "two backward passes": "loss().backward()\nloss().backward()\nfor p in parameters:\n    p.data.sub_(p.grad)",
    "only the last layer": "loss().backward()\nfor p in model[1].parameters():\n    p.data.sub_(p.grad)",
    "gradients of their own": "gradients = torch.autograd.grad(loss(), parameters)\nwith torch.no_grad():\n"
    "    for p, g in zip(parameters, gradients):\n        p.sub_(g)",
}


def loop(body: str, times: int) -> str:
    return BEGIN + f"for _ in range({times}):\n" + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize("way", WAYS)
def test_updates_by_hand_are_steps(run, way: str) -> None:
    ran = run(loop(WAYS[way], 2) + "raise SystemExit\n", trains=True)
    assert (ran.result.completed, ran.result.status, ran.result.findings) == (2, "completed", ()), ran.err


@pytest.mark.parametrize("way", some(WAYS, ["operator", "other data", "gradients of their own"]))
def test_updates_by_hand_on_the_cpu_alone_are_steps_that_never_use_the_gpu(run, way: str) -> None:
    body = loop(WAYS[way], 2).replace(".cuda()", "").replace(', device="cuda"', "")
    ran = run(body, trains=True)
    (found,) = ran.result.findings
    assert (ran.result.completed, ran.result.status, found.code) == (2, "no-gpu", "no-gpu"), ran.err
    assert "never uses the GPU" in found.message
    assert 'model.to("cuda")' in found.fix


@pytest.mark.parametrize("way", some(WAYS, ["data", "gradients of their own"]))
def test_steps_by_hand_end_the_script(run, way: str) -> None:
    ran = run(loop(WAYS[way], 100) + "    print('round')\n", steps=4)
    assert ran.result.completed == 4
    assert 3 <= ran.out.count("round") <= 4


def test_memory_of_parameters_that_no_optimizer_holds_has_its_name(run) -> None:
    body = """
import torch
w = torch.zeros(1 << 20, device="cuda", requires_grad=True)
for _ in range(3):
    (w * 2).sum().backward()
    with torch.no_grad():
        w -= w.grad
"""
    ran = run(body, card=card("rtx4090"))
    assert ran.result.categories["parameters"] == 4 << 20
    assert ran.result.categories["gradients"] == 4 << 20


def test_what_else_writes_to_parameters_is_no_step_beside_an_optimizer(run) -> None:
    body = """
optimizer = torch.optim.SGD(parameters, lr=0.1)
for _ in range(100):
    loss().backward()
    optimizer.step()
    for p in parameters:
        p.data.clamp_(-1, 1)
    print("round")
"""
    ran = run(BEGIN + body)
    assert (ran.result.completed, ran.out.count("round")) == (3, 2)


@pytest.mark.parametrize("waits", [False, True])
def test_training_in_a_thread_counts_and_ends(run, waits: bool) -> None:
    body = f"""
def train():
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    while True:
        loss().backward()
        optimizer.step()
        torch.zeros(2) + loss().cpu()

done = threading.Event()
thread = threading.Thread(target=train)
thread.start()
done.wait() if {waits} else thread.join()
"""
    ran = run(BEGIN + body, time_limit=60.0)
    assert (ran.result.completed, ran.result.status, ran.err) == (3, "completed", "")


@pytest.mark.parametrize("how", ["environment", "call"])
def test_settings_of_the_allocator_are_said_not_to_be_obeyed(run, how: str) -> None:
    words = "expandable_segments:True,max_split_size_mb:64"
    setting = {
        "environment": f'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "{words}"',
        "call": f'torch.cuda.memory._set_allocator_settings("{words}")',
    }
    body = f"""
import os, torch
{setting[how]}
w = torch.zeros(3, device="cuda", requires_grad=True)
for _ in range(3):
    w.sum().backward()
    w.data.sub_(w.grad)
"""
    ran = run(body, card=card("rtx4090"))
    said = "not simulated: expandable_segments:True, max_split_size_mb:64"
    assert any(said in note for note in ran.result.notes)


def test_what_was_counted_so_far_can_be_forgotten(run) -> None:
    body = """
import torch
x = torch.zeros(1000, device="cuda")
torch.cuda.reset_accumulated_memory_stats()
print([torch.cuda.memory_stats()[f"allocated_bytes.all.{n}"] for n in ("current", "allocated", "freed")])
del x
torch.accelerator.reset_peak_memory_stats()
print([torch.cuda.memory_stats()[f"allocated_bytes.all.{n}"] for n in ("current", "allocated", "freed")])
torch.cuda.reset_accumulated_host_memory_stats()
"""
    ran = run(body, card=card("rtx4090"))
    assert (ran.out, ran.err) == ("[4096, 0, 0]\n[0, 0, 4096]\n", "")
