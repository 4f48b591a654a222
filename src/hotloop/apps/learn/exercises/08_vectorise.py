"""Write `contrast` without a loop.

It makes dark pixels darker (half as bright, where they are below 0.5) and
bright ones brighter (1.5 times, and at most 1). Pixel by pixel that takes
milliseconds. Write it as operations on the whole picture, with the same
result.
"""

import torch


def contrast(image):
    result = torch.empty_like(image)
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            value = float(image[y, x])
            if value < 0.5:
                result[y, x] = value * 0.5
            else:
                result[y, x] = min(value * 1.5, 1.0)
    return result


torch.manual_seed(0)
image = torch.rand(32, 32)
print(f"mean {image.mean():.3f} -> {contrast(image).mean():.3f}")
