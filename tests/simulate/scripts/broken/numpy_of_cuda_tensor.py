# why: Tensor.numpy() raises TypeError for a CUDA tensor: it must go to the CPU first.
# twin: notebook_sine.py
# steps: 10
# expect: numpy-of-cuda error at prediction, fix .cpu()
# expect: numpy-of-cuda error at losses

# # Fitting a sine

# In[1]:

import numpy as np
import torch
import torch.nn as nn

device = "cuda" if torch.cuda.is_available() else "cpu"
device

# In[2]:

rng = np.random.default_rng(0)
x = rng.uniform(-3, 3, size=(64, 1)).astype(np.float32)
y = np.sin(x)
x_t = torch.from_numpy(x).to(device)
y_t = torch.from_numpy(y).to(device)
x_t.shape, y_t.shape

# In[3]:

model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = nn.MSELoss()
history = []

# In[5]:

for epoch in range(10):
    optimizer.zero_grad()
    pred = model(x_t)
    loss = criterion(pred, y_t)
    loss.backward()
    optimizer.step()
    history.append(loss.detach())

# In[6]:

fit = pred.detach().numpy()  # <- prediction
error = np.abs(fit - y).max()
losses = torch.stack(history).numpy()  # <- losses
print(f"largest error {error:.3f}, last loss {losses[-1]:.3f}")
