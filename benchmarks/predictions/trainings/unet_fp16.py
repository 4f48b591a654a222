"""The same UNet in fp16 with a gradient scaler, RMSprop and a Dice loss."""

import argparse

import torch
import torch.nn.functional as F
from models.unet import UNet

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = UNet(classes=1).to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.9)
scaler = torch.amp.GradScaler(device)
images, masks = torch.randn(args.batch, 3, 256, 256), torch.randint(0, 2, (args.batch, 1, 256, 256)).float()


def dice_loss(scores, target):
    guess = scores.sigmoid()
    both = (guess * target).sum((1, 2, 3))
    return 1 - ((2 * both + 1) / (guess.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()


for step in range(args.steps):
    x, y = images.to(device), masks.to(device)
    with torch.autocast(device, dtype=torch.float16):
        scores = model(x)
        loss = F.binary_cross_entropy_with_logits(scores, y) + dice_loss(scores.float(), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: loss {loss.item():.4f}")
