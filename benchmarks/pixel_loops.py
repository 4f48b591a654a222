"""The loops over pixels that `hotloop.apps.sprites.pixels` replaces: plain Python on nested lists, slow and plain.

The benchmark times them, and the tests hold every operation to them. Sprites are lists [n][h][w] of indices, pictures
lists [n][h][w] of [r, g, b, a].
"""

from typing import Any

Sprites = list[list[list[int]]]
Pictures = list[list[list[list[int]]]]
BAYER = [[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]


def look_up(sprites: Sprites, palette: list[list[int]]) -> Pictures:
    pictures = blank(sprites)
    for i in range(len(sprites)):
        for y in range(len(sprites[i])):
            for x in range(len(sprites[i][y])):
                pictures[i][y][x] = palette[sprites[i][y][x]]
    return pictures


def nearest_colour(pictures: Pictures, palette: list[list[int]]) -> Sprites:
    sprites = blank(pictures)
    for i in range(len(pictures)):
        for y in range(len(pictures[i])):
            for x in range(len(pictures[i][y])):
                sprites[i][y][x] = nearest_index(pictures[i][y][x], palette)
    return sprites


def nearest_index(colour: list[int], palette: list[list[int]]) -> int:
    r, g, b, a = colour
    if a < 128:
        return 0
    best, least = 0, 1 << 30
    for index in range(1, len(palette)):
        red, green, blue, _ = palette[index]
        distance = (r - red) ** 2 + (g - green) ** 2 + (b - blue) ** 2
        if distance < least:
            best, least = index, distance
    return best


def dither(pictures: Pictures, palette: list[list[int]], strength: int = 32) -> Sprites:
    sprites = blank(pictures)
    for i in range(len(pictures)):
        for y in range(len(pictures[i])):
            for x in range(len(pictures[i][y])):
                r, g, b, a = pictures[i][y][x]
                level = (2 * BAYER[y % 4][x % 4] - 15) * strength // 32
                shifted = [min(max(c + level, 0), 255) for c in (r, g, b)]
                sprites[i][y][x] = nearest_index([*shifted, a], palette)
    return sprites


def flip(sprites: Sprites, *, vertical: bool = False) -> Sprites:
    flipped = blank(sprites)
    for i in range(len(sprites)):
        for y in range(len(sprites[i])):
            for x in range(len(sprites[i][y])):
                flipped[i][y][x] = sprites[i][-1 - y][x] if vertical else sprites[i][y][-1 - x]
    return flipped


def rotate(sprites: Sprites, quarter_turns: int = 1) -> Sprites:
    for _ in range(quarter_turns % 4):
        height, width = len(sprites[0]), len(sprites[0][0])
        turned = [[[0] * height for _ in range(width)] for _ in sprites]
        for i in range(len(sprites)):
            for y in range(width):
                for x in range(height):
                    turned[i][y][x] = sprites[i][x][width - 1 - y]
        sprites = turned
    return sprites


def outline(sprites: Sprites, colour: int) -> Sprites:
    drawn = blank(sprites)
    for i in range(len(sprites)):
        height, width = len(sprites[i]), len(sprites[i][0])
        for y in range(height):
            for x in range(width):
                drawn[i][y][x] = sprites[i][y][x]
                if sprites[i][y][x] == 0:
                    for beside, below in ((x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)):
                        if 0 <= beside < width and 0 <= below < height and sprites[i][below][beside]:
                            drawn[i][y][x] = colour
    return drawn


def shift_hue(sprites: Sprites, mapping: list[int]) -> Sprites:
    shifted = blank(sprites)
    for i in range(len(sprites)):
        for y in range(len(sprites[i])):
            for x in range(len(sprites[i][y])):
                shifted[i][y][x] = mapping[sprites[i][y][x]]
    return shifted


def upscale(sprites: Sprites, factor: int) -> Sprites:
    height, width = len(sprites[0]) * factor, len(sprites[0][0]) * factor
    large = [[[0] * width for _ in range(height)] for _ in sprites]
    for i in range(len(sprites)):
        for y in range(height):
            for x in range(width):
                large[i][y][x] = sprites[i][y // factor][x // factor]
    return large


def contact_sheet(pictures: Pictures, columns: int, gap: int, background: list[int]) -> list[list[list[int]]]:
    count, height, width = len(pictures), len(pictures[0]), len(pictures[0][0])
    rows = -(-count // columns)
    sheet = [[background] * (columns * (width + gap) + gap) for _ in range(rows * (height + gap) + gap)]
    for i in range(count):
        top, left = gap + i // columns * (height + gap), gap + i % columns * (width + gap)
        for y in range(height):
            for x in range(width):
                sheet[top + y][left + x] = pictures[i][y][x]
    return sheet


def blank(sprites: list[list[list[Any]]]) -> list[list[list[Any]]]:
    return [[[0] * len(row) for row in sprite] for sprite in sprites]
