# style: REINFORCE on a toy world; every action is read back, which this kind of loop has to
# steps: 3
# expect: nothing
# expect: sync item at action, times 6
# expect: copy to the device at observe

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical


class Corridor:
    """Walk right to win; the state is where one stands."""

    def reset(self):
        self.at, self.time = 2, 0
        return self.observe()

    def observe(self):
        return np.eye(6, dtype=np.float32)[self.at]

    def step(self, action):
        self.at = min(max(self.at + (1 if action == 1 else -1), 0), 5)
        self.time += 1
        return self.observe(), float(self.at == 5), self.at == 5 or self.time >= 6


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
world = Corridor()

for episode in range(3):
    state, done, log_probs, rewards = world.reset(), False, [], []
    while not done:
        logits = policy(torch.from_numpy(state).to(device))  # <- observe
        choice = Categorical(logits=logits)
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        state, reward, done = world.step(action.item())  # <- action
        rewards.append(reward)
    returns = torch.tensor(np.cumsum(rewards[::-1])[::-1].copy(), dtype=torch.float32, device=device)
    loss = -(torch.stack(log_probs) * (returns - returns.mean())).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if sum(rewards) > 0:
        print("episode", episode, "reached the end in", len(rewards))
print("policy", policy(torch.eye(6, device=device)).softmax(1)[:, 1].detach().cpu().numpy().round(2))
