# style: a student learns from a teacher; loss in a function, try and finally around the loop
# steps: 4
# expect: nothing

import torch
import torch.nn.functional as F
from torch import nn


def network(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 4))


def distil(student_logits, teacher_logits, labels, heat=2.0, alpha=0.7):
    soft = F.kl_div(
        F.log_softmax(student_logits / heat, dim=1), F.softmax(teacher_logits / heat, dim=1), reduction="batchmean"
    )
    return alpha * heat**2 * soft + (1 - alpha) * F.cross_entropy(student_logits, labels)


device = "cuda" if torch.cuda.is_available() else "cpu"
teacher, student = network(64).eval(), network(8)
student.to(device)
teacher.to(device)
optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

done = 0
try:
    for _ in range(4):
        x = torch.randn(16, 10, device=device)
        y = x[:, :4].argmax(1)
        with torch.no_grad():
            wanted = teacher(x)
        loss = distil(student(x), wanted, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
finally:
    print("steps done:", done)
