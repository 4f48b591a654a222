"""Device bugs, each found at its line, and each healthy twin silent."""

from textwrap import dedent, indent

import pytest

HEAD = """
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

device = torch.device("cuda")


def train(model, x, y, criterion=F.cross_entropy, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
    return loss


x, y = torch.randn(8, 16), torch.randint(4, (8,))
"""

# Beside the broken scripts of the corpus: what is wrong, the code of its finding, words of the fix, the script (`# <-`
# marks the line), and what cures it.
TWINS = {
    "the model stays on the host": (
        "model-on-cpu",
        "model = model.to(device)",
        """
        model = nn.Sequential(
            nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        out = model(x.to(device))  # <-
        out.sum().backward()
        train(model.to(device), x.to(device), y.to(device))
        """,
        ("nn.Linear(8, 4))", "nn.Linear(8, 4)).to(device)"),
    ),
    "layers are in a plain dict": (
        "left-on-cpu",
        "layers = nn.ModuleDict(layers)",
        """
        layers = {"first": nn.Linear(16, 4)}
        def forward(x):
            return layers["first"](x)  # <-
        optimizer = torch.optim.SGD(layers["first"].parameters(), lr=0.1)
        F.cross_entropy(forward(x.to(device)), y.to(device)).backward()
        optimizer.step()
        """,
        ('{"first": nn.Linear(16, 4)}', 'nn.ModuleDict({"first": nn.Linear(16, 4)}).to(device)'),
    ),
    "NumPy is asked to read the device": (
        "numpy-of-cuda",
        "out.detach().cpu().numpy()",
        """
        model = nn.Linear(16, 4).to(device)
        out = model(x.to(device))
        train(model, x.to(device), y.to(device))
        print(out.numpy().sum())  # <-
        """,
        ("out.numpy()", "out.detach().cpu().numpy()"),
    ),
    "np.asarray of a tensor on the device": (
        "numpy-of-cuda",
        "out.cpu().numpy()",
        """
        with torch.no_grad():
            out = nn.Linear(16, 4).to(device)(x.to(device))
        print(np.asarray(out).shape)  # <-
        """,
        ("np.asarray(out)", "np.asarray(out.cpu())"),
    ),
}


def numbered(text: str) -> str:
    return HEAD + dedent(text)


@pytest.mark.parametrize("bug", list(TWINS))
def test_a_bug_is_found_at_its_line(bug: str, run) -> None:
    code, fix, buggy, _ = TWINS[bug]
    ran = run(numbered(buggy), steps=50)
    assert ran.result.error is None, ran.result.error
    (found,) = ran.result.findings
    assert (found.code, found.level, found.confidence, found.file) == (code, "error", "shown", "train.py")
    assert found.line == ran.line("# <-")
    assert fix in found.fix


def test_their_healthy_twins_are_silent(run) -> None:
    """All in one script, each in a function of its own: a finding would name its line."""
    script = HEAD + "".join(
        f"\ndef twin_{number}():\n{indent(dedent(buggy.replace(*cure)), '    ')}\ntwin_{number}()\nprint({number})\n"
        for number, (_, _, buggy, cure) in enumerate(TWINS.values())
    )
    ran = run(script, steps=500)
    assert ran.result.error is None, ran.result.error
    assert ran.result.findings == ()
    assert ran.out.splitlines()[-1] == str(len(TWINS) - 1)


def test_all_bugs_are_found_in_one_run_and_counted(run) -> None:
    ran = run(
        numbered(
            """
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc = nn.Linear(16, 4)
                    self.bias = torch.zeros(4)

                def forward(self, x):
                    return self.fc(x) + self.bias  # attribute

            model = Net().cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                out = model(x.cuda())
                loss = F.cross_entropy(out, y)  # target
                loss.backward()
                optimizer.step()
            """
        )
    )
    assert ran.result.completed == 3
    found = {finding.line: (finding.code, finding.count) for finding in ran.result.findings}
    assert found == {
        ran.line("# attribute"): ("left-on-cpu", 3),
        ran.line("# target"): ("mixed-devices", 3),
    }


def test_a_finding_names_the_tensors_and_where_they_were_made(run) -> None:
    ran = run(
        numbered(
            """
            model = nn.Linear(16, 4).to(device)
            extra = torch.ones(8, 16)  # made
            model(x.to(device) + extra)
            """
        )
    )
    (found,) = ran.result.findings
    assert "(variable extra): (8, 16) float32 on cpu" in found.message
    assert f"train.py:{ran.line('# made')}" in found.message
    assert "(8, 16) float32 on cuda:0" in found.message


def test_what_pytorch_allows_is_no_finding(run) -> None:
    ran = run(
        numbered(
            """
            a = torch.randn(8, 4, device=device)
            a * torch.tensor(2.0) + torch.tensor(1)
            a[torch.tensor([0, 2])], a[torch.tensor([True] * 8)], a[0], a[:, torch.tensor([1])]
            a[torch.tensor([1])] = 0.0
            a[0] = torch.ones(4)
            a.copy_(torch.ones(8, 4))
            torch.where(a > 0, a, torch.tensor(0.0))
            torch.clamp(a, max=torch.tensor(1.0))
            torch.ones(8, 4).copy_(a)
            a.new_tensor([1.0]) + a[0, 0]
            torch.zeros(3).to(a)
            model = nn.Linear(4, 4).to(device)
            torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
            log_probs = torch.randn(5, 2, 4, device=device).log_softmax(2)
            F.ctc_loss(log_probs, torch.ones(2, 3, dtype=torch.long), torch.tensor([5, 5]), torch.tensor([3, 2]))
            F.ctc_loss(log_probs, torch.ones(2, 3, dtype=torch.long, device=device), [5, 5], [3, 2])
            """
        )
    )
    assert ran.result.error is None, ran.result.error
    assert ran.result.findings == ()


def test_a_generator_of_another_device(run) -> None:
    ran = run(numbered("torch.randn(3, device=device, generator=torch.Generator())  # <-\n"))
    (found,) = ran.result.findings
    assert (found.code, found.line) == ("generator-device", ran.line("# <-"))
