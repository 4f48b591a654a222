"""What the engine tells of a script, in order: operations, memory, copies, waits, steps."""

import json
import os
from collections import Counter

import pytest

from .conftest import CARD

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F

"""
TRAIN = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.register_buffer("shift", torch.zeros(4))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x)) + self.shift

model = Net().to("cuda")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    x = torch.randn(8, 16).to("cuda")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()  # backward
    optimizer.step()  # step
    loss.item()
"""
)


@pytest.fixture
def heard(run):
    """Simulate a script and give what a listener heard of it, with the script."""

    def call(script: str, *arguments: str, **options):
        ran = run(script, *arguments, listeners=["heard:Heard"], **options)
        assert ran.result.error is None, ran.result.error
        return ran, [json.loads(note) for note in ran.result.notes if note.startswith("[")]

    return call


@pytest.fixture(scope="module")
def trained(simulator, tmp_path_factory: pytest.TempPathFactory):
    """What a listener heard of a training."""
    path = tmp_path_factory.mktemp("trained") / "train.py"
    path.write_text(TRAIN)
    found = simulator.run(path, [], CARD, listeners=["heard:Heard"], timed=False)
    return [json.loads(note) for note in found.notes if note.startswith("[")]


def operations(events, phase=None):
    return [event for event in events if event[0] == "after" and phase in (None, event[2])]


def test_every_memory_comes_once_and_goes_once_and_each_step_leaves_the_same(trained) -> None:
    sizes, left = {}, []
    for event in trained:
        if event[0] == "step":
            left.append(sum(sizes.values()))
        elif event[0] == "allocated":
            assert event[1] not in sizes
            sizes[event[1]] = event[2]
        elif event[0] == "freed":
            del sizes[event[1]]
    assert len(left) == 3
    assert left[1] == left[2] >= left[0] > 0


def test_gradients_are_called_so_before_the_optimizer_looks(trained) -> None:
    first = next(i for i, event in enumerate(trained) if event[0] == "after" and event[2] == "optimizer")
    gradients = {event[1] for event in trained[:first] if event[-1] == "gradient"}
    assert len(gradients) == 4


def test_memory_is_called_what_it_is(trained) -> None:
    sizes, kinds = {}, {}
    for event in trained:
        if event[0] == "allocated":
            sizes[event[1]], kinds[event[1]] = event[2:]
        elif event[0] == "named":
            kinds[event[1]] = event[2]
        elif event[0] == "freed" and kinds[event[1]] in ("parameter", "optimizer", "buffer"):
            pytest.fail("a weight or a state went away")
    total = Counter()
    for key, kind in kinds.items():
        total[kind] += sizes[key]
    weights = 4 * (16 * 32 + 32 + 32 * 4 + 4)
    assert total["parameter"] == weights
    assert total["buffer"] == 4 * 4
    assert total["optimizer"] == 2 * weights
    assert total["gradient"] == 3 * weights  # of three steps, each set to None before the next
    assert total["input"] == 3 * 8 * 16 * 4
    assert total["activation"] > 0


def test_an_operation_is_told_around_the_memory_of_its_results(trained) -> None:
    at = next(i for i, event in enumerate(trained) if event[:2] == ["before", "aten.addmm.default"])
    assert [event[0] for event in trained[at : at + 3]] == ["before", "allocated", "after"]
    assert trained[at + 1][2:] == [8 * 32 * 4, "activation"]
    assert trained[at + 2][5] == [
        [[32], "float32", "cuda"],
        [[8, 16], "float32", "cuda"],
        [[16, 32], "float32", "cuda"],
    ]


def test_phases_modules_and_lines(trained) -> None:
    line = {
        words: n for n, text in enumerate(TRAIN.splitlines(), 1) for words in ("# backward", "# step") if words in text
    }
    forward = [event for event in operations(trained, "forward") if event[1] == "aten.addmm.default"]
    assert [event[3] for event in forward[:2]] == ["body.0", "head"]
    backward = operations(trained, "backward")
    assert {event[4] for event in backward} == {line["# backward"]}
    assert {"body.0", "head"} <= {event[3] for event in backward if event[1] == "aten.mm.default"}
    optimizer = operations(trained, "optimizer")
    assert {event[4] for event in optimizer} == {line["# step"]}
    assert any(event[1].startswith("aten._foreach_") for event in optimizer)
    assert sum(event == ["step"] for event in trained) == 3


def test_copies_and_waits_have_their_lines(run) -> None:
    ran = run(
        HEAD
        + """
model = nn.Linear(16, 4).to("cuda")  # moves
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    x = torch.randn(8, 16).pin_memory().to("cuda", non_blocking=True)  # pinned
    y = torch.randint(4, (8,)).cuda()  # pageable
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    float(loss), bool(loss > 0)  # asks
    print(loss)  # prints
    loss.cpu()  # back
    x[torch.tensor([0, 2])]  # picks
    (y > 1).nonzero()  # counts
    torch.cuda.synchronize()  # all
"""
    )
    found = {(c.line, c.direction, c.pinned, c.blocking): (c.bytes, c.count) for c in ran.result.copies}
    assert found == {
        (ran.line("# moves"), "to the device", False, True): (4 * (64 + 4), 2),
        (ran.line("# pinned"), "to the device", True, False): (3 * 512, 3),
        (ran.line("# pageable"), "to the device", False, True): (3 * 64, 3),
        (ran.line("# back"), "to the host", False, True): (2 * 4, 2),
        (ran.line("# picks"), "to the device", False, True): (2 * 16, 2),
    }
    syncs = {(s.line, s.kind): s.count for s in ran.result.syncs}
    assert syncs == {
        (ran.line("# asks"), "item"): 4,
        (ran.line("# prints"), "print"): 2,
        (ran.line("# counts"), "nonzero"): 2,
        (ran.line("# all"), "synchronize"): 2,
    }


def test_attention_takes_the_operation_that_a_gpu_would(heard) -> None:
    numbers = "torch.zeros(2, 4, 16, {}, device='cuda')"
    cases = {  # type and mask: the kernel, and whether the mask is copied, whose rows begin anywhere
        ("float16", "None"): ("flash", False),
        ("bfloat16", "None"): ("flash", False),
        ("float32", "None"): ("efficient", False),
        ("float16", "torch.ones(2, 4, 16, 16, device='cuda', dtype=torch.bool)"): ("efficient", False),
        ("float32", numbers.format(16)): ("efficient", False),
        ("float32", numbers.format(12)): ("efficient", True),
    }
    script = HEAD
    for number, (dtype, mask) in enumerate(cases):
        script += f"""
mask = {mask}
many = 16 if mask is None else mask.shape[-1]
q, k = (torch.randn(2, 4, n, 8, device="cuda", dtype=torch.{dtype}, requires_grad=True) for n in (16, many))
y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)  # forward {number}
y.float().sum().backward()  # backward {number}
assert q.grad.shape == q.shape
"""
    ran, events = heard(script)
    for number, (name, copied) in enumerate(cases.values()):
        forward, backward = (
            [event[1] for event in operations(events) if event[4] == ran.line(f"# {phase} {number}")]
            for phase in ("forward", "backward")
        )
        assert f"aten._scaled_dot_product_{name}_attention.default" in forward
        assert any(f"{name}_attention_backward" in each for each in backward)
        assert ("aten.constant_pad_nd.default" in forward) is copied


def test_attention_whose_numbers_lie_apart_is_computed_plainly_and_in_full_precision(heard) -> None:
    """As a GPU does it: kernels want rows of heads and masks in one piece, and autocast does not reach inside."""
    _, events = heard(
        HEAD
        + """
for heads, mask in [
    (torch.randn(2, 4, 8, 6).transpose(2, 3), None),
    (torch.randn(2, 4, 6, 8), torch.zeros(6, 6, 4, device="cuda").permute(2, 0, 1)),  # a bias that was looked up: T5
    (torch.randn(2, 4, 6, 8), torch.ones(2, 1, 6, 1, device="cuda", dtype=torch.bool).expand(2, 4, 6, 6)),
]:
    q = heads.cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        assert y.dtype == torch.bfloat16
    y.float().sum().backward()
"""
    )
    names = [event[1] for event in operations(events)]
    assert not any("_attention" in name for name in names)
    assert sum(name in ("aten._softmax.default", "aten._safe_softmax.default") for name in names) == 3


def test_the_mask_of_dropout_comes_before_its_result(heard) -> None:
    """Which decides the block that each gets."""
    _, events = heard(HEAD + "x = torch.randn(1024, 1024, device='cuda', requires_grad=True)\nF.dropout(x, 0.5)\n")
    sizes = [event[2] for event in events if event[0] == "allocated"]
    assert sizes[-2:] == [1024 * 1024, 4 * 1024 * 1024]


def test_recurrent_layers_take_cudnns_operation(heard) -> None:
    ran, events = heard("recurrent")
    assert (ran.result.completed, ran.result.findings) == (3, ())
    names = Counter(event[1] for event in operations(events))
    assert names["aten._cudnn_rnn.default"] == 3 * 2
    assert names["aten._cudnn_rnn_backward.default"] == 3 * 2


def test_norms_take_the_operations_that_a_gpu_would(heard) -> None:
    _, events = heard(
        HEAD
        + """
x = torch.randn(2, 4, 6, 6, device="cuda", requires_grad=True)
nn.RMSNorm(6).cuda()(nn.BatchNorm2d(4).cuda()(x)).sum().backward()
with torch.autocast("cuda", torch.bfloat16):
    nn.BatchNorm2d(4).cuda()(x.bfloat16())  # for which PyTorch does not ask cuDNN
"""
    )
    told = [event[1].split(".")[1] for event in operations(events) if "norm" in event[1]]
    assert told[:4] == ["cudnn_batch_norm", "_fused_rms_norm", "_fused_rms_norm_backward", "cudnn_batch_norm_backward"]
    assert "native_batch_norm" in told[4]


def test_lazy_modules_come_to_the_device_with_their_shapes(run) -> None:
    model = "model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))"
    known = "model(torch.ones(1, 3, 5, 5))"
    ran = run(f"{HEAD}{model}\n{known}\nmodel.cuda()(torch.ones(1, 3, 5, 5).cuda()).sum().backward()\n")
    assert ran.result.findings == ()
    ran = run(f"{HEAD}{model}\nmodel.cuda()\n")
    (found,) = ran.result.findings
    assert (found.code, found.line) == ("not-simulated", ran.line("model.cuda()"))
    assert "on the CPU first" in found.fix


def test_batches_that_the_host_makes_are_told(heard) -> None:
    _, events = heard(
        HEAD
        + """
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.zeros(2)
for batch in torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=2):
    batch.cuda()
"""
    )
    told = [event for event in events if event[0] == "copied" or event[2:] == [min(2, os.cpu_count() or 1)]]
    assert [event[0] for event in told if event[0] == "copied" or event[1] > 0.01] == ["loaded", "copied"] * 3


def test_checkpointed_activations_are_computed_again_in_backward(heard) -> None:
    _, events = heard(
        HEAD
        + """
from torch.utils.checkpoint import checkpoint
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).cuda()
for reentrant in (False, True):
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
"""
    )
    again = [event[3] for event in operations(events, "backward") if event[1] == "aten.addmm.default"]
    assert again == ["0", "0", "2"]  # the newer way stops once it has what it needs


def test_work_on_the_host_is_real_and_is_not_told(heard) -> None:
    _, events = heard(
        HEAD
        + """
a = torch.arange(6.0).reshape(2, 3)
assert (a @ a.T).tolist() == [[5.0, 14.0], [14.0, 50.0]] and a.numpy().sum() == 15
assert torch.linalg.inv(torch.eye(2)).tolist() == [[1.0, 0.0], [0.0, 1.0]]
"""
    )
    assert events == [["card", "test"]]


def test_a_large_model_takes_no_memory_of_the_host(run) -> None:
    ran = run(
        HEAD
        + """
import resource
model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(24))).to("cuda")  # 1.6 GB
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, torch.cuda.memory_allocated())
"""
    )
    host, device = map(int, ran.out.split())
    assert host < 1200
    assert device == 24 * 4 * 4096 * 4097


def test_the_same_in_inference_mode(heard) -> None:
    _, events = heard(
        HEAD
        + """
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4)).cuda().eval()
with torch.inference_mode():
    out = model(torch.ones(2, 4, device="cuda"))
    assert out.is_cuda and torch.allclose(out, out)
"""
    )
    assert any(event[1] == "aten.addmm.default" for event in operations(events))


def test_a_bias_is_added_in_place_to_a_product_of_what_is_not_contiguous(heard) -> None:
    script = (
        HEAD
        + """
layer = nn.Linear(8, 16).cuda()
x = torch.randn(5, 4, 8).cuda().transpose(0, 1)
with torch.autocast("cuda", torch.bfloat16):
    assert layer(x).dtype == torch.bfloat16
loss = layer(x).square().mean()  # line
loss.backward()
assert layer.bias.grad is not None
"""
    )
    _, events = heard(script)
    line = next(number for number, text in enumerate(script.splitlines(), 1) if text.endswith("# line"))
    names = [event[1] for event in operations(events) if event[4] == line]
    assert names[:3] == ["aten.clone.default", "aten.mm.default", "aten.add_.Tensor"]


def test_what_a_backward_pass_made_is_differentiated_last(heard) -> None:
    """As on a GPU, whose backward pass runs in a thread that counts its own operations from the first."""
    script = (
        HEAD
        + """
layer = nn.Linear(4, 4, bias=False).cuda()
for _ in range(2):
    x = torch.randn(8, 4).cuda().requires_grad_()
    plain = layer(x).sigmoid().sum()
    (slope,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    loss = plain + slope.square().sum()
    loss.backward()  # last
"""
    )
    _, events = heard(script)
    line = next(number for number, text in enumerate(script.splitlines(), 1) if text.endswith("# last"))
    names = [event[1].split(".")[1] for event in operations(events, "backward") if event[4] == line]
    half = len(names) // 2
    for step in (names[:half], names[half:]):
        assert step.index("sigmoid_backward") < step.index("tanh_backward")
