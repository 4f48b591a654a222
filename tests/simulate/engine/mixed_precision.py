"""autocast, GradScaler, accumulation and clipping."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cuda")
assert scaler.is_enabled()
for step in range(30):
    x, y = torch.randn(8, 16).cuda(), torch.randint(4, (8,)).cuda()
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y) / 4
    assert out.dtype == torch.float16 and loss.dtype == torch.float32
    scaler.scale(loss).backward()
    if (step + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert before == scaler.get_scale() == 65536.0
        optimizer.zero_grad(set_to_none=True)
        print("updated at", step)
