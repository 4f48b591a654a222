"""A graph network that names the nodes of graphs with 200 nodes and 1,600 edges each, by messages: fp32, AdamW."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
nodes, edges, node_features, edge_features, classes = 200, 1600, 50, 16, 121


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x, edge, source, target, degree):
        messages = self.message(torch.cat([x[source], x[target], edge], dim=1))
        received = torch.zeros_like(x).index_add_(0, target, messages) / degree
        return self.norm(x + self.update(torch.cat([x, received], dim=1)))


class GraphNet(nn.Module):
    def __init__(self, width=128, layers=6):
        super().__init__()
        self.nodes, self.edges = nn.Linear(node_features, width), nn.Linear(edge_features, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x, edge, links):
        source, target = links
        degree = torch.zeros(len(x), 1, device=x.device)
        degree.index_add_(0, target, torch.ones(len(target), 1, device=x.device))
        degree = degree.clamp(min=1)
        x, edge = self.nodes(x), self.edges(edge)
        for layer in self.layers:
            x = layer(x, edge, source, target, degree)
        return self.head(x)


model = GraphNet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
# a batch is one large graph without links between its parts
features = torch.randn(args.batch * nodes, node_features)
link_features = torch.randn(args.batch * edges, edge_features)
offsets = nodes * torch.arange(args.batch).repeat_interleave(edges)
all_links = torch.randint(0, nodes, (2, args.batch * edges)) + offsets
labels = torch.randint(0, classes, (args.batch * nodes,))

model.train()
for step in range(args.steps):
    x, edge, links, y = (each.to(device) for each in (features, link_features, all_links, labels))
    scores = model(x, edge, links)
    loss = F.cross_entropy(scores, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    correct = (scores.argmax(dim=1) == y).float().mean()
    print(f"step {step}: loss {loss.item():.4f}, {correct.item():.1%} right")
