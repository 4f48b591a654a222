"""One drawing for each class of sprite: a function from dice to palette indices."""

from collections.abc import Callable

from torch import Tensor

from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.shapes.beings import creature, fish, ghost, skull
from hotloop.apps.sprites.shapes.nature import flower, mushroom, tree
from hotloop.apps.sprites.shapes.scenery import house, ship
from hotloop.apps.sprites.shapes.treasure import gem, heart, potion
from hotloop.apps.sprites.shapes.weapons import axe, key, shield, sword

Drawing = Callable[[Dice], Tensor]

DRAWINGS: dict[str, Drawing] = {
    "creature": creature,
    "ghost": ghost,
    "skull": skull,
    "sword": sword,
    "axe": axe,
    "shield": shield,
    "potion": potion,
    "gem": gem,
    "heart": heart,
    "key": key,
    "tree": tree,
    "mushroom": mushroom,
    "flower": flower,
    "ship": ship,
    "fish": fish,
    "house": house,
}
