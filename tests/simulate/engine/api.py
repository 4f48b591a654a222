"""Many questions to `torch.cuda`, and tensors that go back and forth."""

import numpy as np
import torch
from torch import nn

assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
properties = torch.cuda.get_device_properties("cuda")
print(properties.name, properties.total_memory, torch.cuda.get_device_capability())
torch.cuda.set_device(0)
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
state = torch.cuda.get_rng_state()
torch.cuda.set_rng_state(state)
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.deterministic = False
torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")
assert torch.cuda.is_bf16_supported()
free, total = torch.cuda.mem_get_info()
assert 0 < free < total == properties.total_memory
torch.set_default_device("cuda")
inside = torch.zeros(3)
assert inside.is_cuda and inside.device == torch.device("cuda:0") and inside.get_device() == 0
model = nn.DataParallel(nn.Linear(4, 2))
assert all(p.is_cuda for p in model.parameters())
torch.set_default_device("cpu")
optimizer = torch.optim.Adagrad(model.parameters())
side, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
generator = torch.Generator(device="cuda").manual_seed(1)
known = torch.tensor([3, 1, 2]).cuda()
assert known.tolist() == [3, 1, 2] and known[1].item() == 1 and int(known[2]) == 2
assert known.cpu().numpy().tolist() == [3, 1, 2]
for _ in range(5):
    start.record()
    with torch.cuda.stream(side):
        x = torch.randn(6, 4, generator=generator, device="cuda")
        x.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    loss = model(x).square().mean()
    if torch.isnan(loss).any() or not torch.isfinite(loss):
        raise SystemExit("a loss that is not finite")
    loss.backward()
    optimizer.step()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0.0
    correct = (model(x).argmax(1) == torch.ones(6, device="cuda")).float().mean().item()
    values = np.asarray([loss.detach().cpu().item(), correct])
    assert np.isfinite(values).all()
    chosen = x[x > 0]
    picked = x[torch.tensor([0, 2])]
    assert chosen.dim() == 1 and tuple(picked.shape) == (2, 4)
    assert (x * torch.tensor(2.0)).is_cuda
    print(loss, torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
