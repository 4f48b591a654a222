"""A machine with two GPUs: each has its memory, and tensors on different ones do not mix."""

from hotloop.apps.simulate.cards import card

SPLIT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 4096).to("cuda:0")
        self.second = nn.Linear(4096, 2048).to("cuda:1")

    def forward(self, x):
        x = self.first(x.to("cuda:0")).relu()
        return self.second(MOVED)  # the second half


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
print(torch.cuda.device_count(), torch.accelerator.device_count(), torch.cuda.get_device_name(1))
for _ in range(5):
    loss = net(torch.randn(8, 256)).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    print(loss.device, net.first.weight.grad.device, net.second.weight.grad.device)
"""
MEMORY = ("hotloop.apps.simulate.memory:MemoryListener",)


def test_a_model_on_two_gpus_trains_and_each_has_its_own_memory(run) -> None:
    ran = run(SPLIT.replace("MOVED", 'x.to("cuda:1")'), card=card("rtx4090"), listeners=MEMORY, gpus=2)
    assert (ran.result.error, ran.result.findings, ran.result.completed, ran.result.gpus) == (None, (), 3, 2)
    name = card("rtx4090").name
    assert ran.out.splitlines() == [f"2 2 {name}", *["cuda:1 cuda:0 cuda:1"] * 2]
    first, second = ran.result.devices
    weights = 4 * (4096 * 2048 + 2048), 4 * (256 * 4096 + 4096)
    assert second.allocated > 2 * weights[0] > first.allocated > 2 * weights[1]
    assert ran.result.peak == second
    assert any("all else that is told of memory is told of cuda:1" in note for note in ran.result.notes)


def test_tensors_on_two_gpus_in_one_operation_break_the_golden_rule(run) -> None:
    ran = run(SPLIT.replace("MOVED", "x"), gpus=2)
    (found,) = ran.result.findings
    assert (found.code, found.line, found.count) == ("mixed-devices", ran.line("# the second half"), 3)
    assert "cuda:0 and cuda:1; one operation needs one device" in found.message
    assert ".to(" in found.fix
    assert (ran.result.error, ran.result.completed) == (None, 3)


def test_the_current_gpu_is_where_tensors_go_that_name_none(run) -> None:
    ran = run(
        """
        import threading, torch
        torch.cuda.set_device(1)
        print(torch.zeros(1, device="cuda").device, torch.zeros(1).cuda().device, torch.cuda.current_device())
        with torch.cuda.device(0):
            print(torch.zeros(1, device="cuda").device, torch.randn(1, device="cuda:1").device)
        print(torch.cuda.memory_allocated(0), torch.cuda.memory_allocated())
        kept = torch.zeros(1000, device="cuda:1")
        print(torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(), torch.cuda.memory_allocated("cuda:1"))
        torch.cuda.set_device(2)
        """,
        gpus=2,
    )
    assert ran.out.splitlines() == ["cuda:1 cuda:1 1", "cuda:0 cuda:1", "0 0", "0 4096 4096"]
    (found,) = ran.result.findings
    assert "cuda:2 was asked for" in found.message
    assert "2 GPUs, cuda:0 to cuda:1" in found.message


def test_one_gpu_may_run_out_while_the_other_has_room(run) -> None:
    body = """
import torch
kept = [torch.empty(20 << 30, dtype=torch.uint8, device=f"cuda:{number}") for number in range(2)]
more = torch.empty(10 << 30, dtype=torch.uint8, device="cuda:1")  # no room
"""
    ran = run(body, card=card("rtx4090"), listeners=MEMORY, gpus=2)
    (found,) = ran.result.findings
    assert (ran.result.status, ran.result.fits, found.line) == ("out-of-memory", False, ran.line("# no room"))


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
    for gpus in (1, 2):
        ran = run(body, gpus=gpus)
        assert (ran.result.error, ran.result.findings, ran.result.completed) == (None, (), 3)
