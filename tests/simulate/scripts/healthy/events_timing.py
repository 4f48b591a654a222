# style: CUDA streams, events and timings; one synchronize after the loop
# runs: cuda
# steps: 5
# expect: nothing
# expect: no sync at loop
# expect: sync synchronize at end

import torch
from torch import nn

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
side = torch.cuda.Stream()
batches = [torch.randn(32, 64).pin_memory() for _ in range(5)]
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def upload(batch):
    with torch.cuda.stream(side):
        return batch.to(device, non_blocking=True)


start.record()
following = upload(batches[0])
for i in range(len(batches)):
    torch.cuda.current_stream().wait_stream(side)
    x = following
    x.record_stream(torch.cuda.current_stream())
    if i + 1 < len(batches):
        following = upload(batches[i + 1])
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()  # <- loop
end.record()
torch.cuda.synchronize()  # <- end
print(f"{start.elapsed_time(end) / len(batches):.2f} ms a step")
