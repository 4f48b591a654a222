"""A RetinaNet-like detector: a pyramid over a ResNet-18, anchors on images of 320x320 pixels, focal loss: fp32, SGD."""

import argparse
import math

import torch
import torch.nn.functional as F
from models.resnet import Basic
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
classes, anchors, size, width = 80, 9, 320, 256
grids = [math.ceil(size / stride) for stride in (8, 16, 32, 64, 128)]
places = anchors * sum(grid * grid for grid in grids)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        shapes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.stages = nn.ModuleList(nn.Sequential(Basic(a, b, stride), Basic(b, b, 1)) for a, b, stride in shapes)

    def forward(self, x):
        x, levels = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        return levels[1:]


class Pyramid(nn.Module):
    def __init__(self, inputs=(128, 256, 512)):
        super().__init__()
        self.across = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in inputs)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in inputs)
        self.sixth = nn.Conv2d(inputs[-1], width, 3, 2, 1)
        self.seventh = nn.Conv2d(width, width, 3, 2, 1)

    def forward(self, levels):
        third, fourth, fifth = (across(level) for across, level in zip(self.across, levels, strict=True))
        fourth = fourth + F.interpolate(fifth, scale_factor=2, mode="nearest")
        third = third + F.interpolate(fourth, scale_factor=2, mode="nearest")
        outputs = [smooth(x) for smooth, x in zip(self.smooth, (third, fourth, fifth), strict=True)]
        sixth = self.sixth(levels[-1])
        return [*outputs, sixth, self.seventh(F.relu(sixth))]


class Head(nn.Module):
    def __init__(self, outputs, bias=0.0):
        super().__init__()
        layers = []
        for _ in range(4):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, anchors * outputs, 3, padding=1))
        self.outputs = outputs
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        nn.init.constant_(self.layers[-1].bias, bias)

    def forward(self, levels):
        maps = [self.layers(level).permute(0, 2, 3, 1) for level in levels]
        return torch.cat([each.reshape(len(each), -1, self.outputs) for each in maps], dim=1)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.pyramid = Backbone(), Pyramid()
        self.kinds, self.boxes = Head(classes, bias=-math.log(99)), Head(4)

    def forward(self, x):
        levels = self.pyramid(self.backbone(x))
        return self.kinds(levels), self.boxes(levels)


def focal_loss(scores, truth, alpha=0.25, gamma=2.0):
    share = torch.sigmoid(scores)
    entropy = F.binary_cross_entropy_with_logits(scores, truth, reduction="none")
    right = share * truth + (1 - share) * (1 - truth)
    weight = alpha * truth + (1 - alpha) * (1 - truth)
    return (weight * (1 - right) ** gamma * entropy).sum()


model = Detector().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
images = torch.randn(args.batch, 3, size, size)
# what each anchor should say, as a loader matches it: most see nothing, which is kind 0
found = torch.rand(args.batch, places) < 0.005
kinds = torch.randint(1, classes + 1, (args.batch, places)) * found
boxes = torch.randn(args.batch, places, 4)

for step in range(args.steps):
    x, kind, box = images.to(device), kinds.to(device), boxes.to(device)
    scores, moves = model(x)
    positive = kind > 0
    count = positive.sum().clamp(min=1)
    truth = F.one_hot(kind, classes + 1)[..., 1:].float()
    kind_loss = focal_loss(scores, truth) / count
    box_loss = F.smooth_l1_loss(moves[positive], box[positive], beta=0.1, reduction="sum") / count
    loss = kind_loss + box_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: kinds {kind_loss.item():.4f}, boxes {box_loss.item():.4f}")
