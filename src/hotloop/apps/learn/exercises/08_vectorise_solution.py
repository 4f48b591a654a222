"""Write `contrast` without a loop.

It makes dark pixels darker (half as bright, where they are below 0.5) and
bright ones brighter (1.5 times, and at most 1). Pixel by pixel that takes
milliseconds. Write it as operations on the whole picture, with the same
result.
"""

import torch


def contrast(image):
    return torch.where(image < 0.5, image * 0.5, (image * 1.5).clamp(max=1))


torch.manual_seed(0)
image = torch.rand(32, 32)
print(f"mean {image.mean():.3f} -> {contrast(image).mean():.3f}")
