# why: without pinned memory a non-blocking copy is not asynchronous.
# twin: workers_pinned.py
# steps: 6
# expect: copy to the device at batch, pageable, times 12

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        signal = np.sin(np.linspace(0, index % 7 + 1, 32)) + rng.normal(0, 0.1, 32)
        return torch.tensor(signal, dtype=torch.float32).unsqueeze(0), index % 7


def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def main():
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    loader = DataLoader(
        Waves(),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        pin_memory=False,
        worker_init_fn=seed_worker,
        drop_last=True,
    )
    model = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 7))
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)  # <- batch
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print("last loss", loss.item())


if __name__ == "__main__":
    main()
