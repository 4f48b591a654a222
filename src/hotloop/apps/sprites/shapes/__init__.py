"""One drawing for each class of sprite: a function from dice to palette indices."""

from hotloop.apps.sprites.shapes.beings import creature, fish, ghost, skull
from hotloop.apps.sprites.shapes.nature import flower, mushroom, tree
from hotloop.apps.sprites.shapes.scenery import house, ship
from hotloop.apps.sprites.shapes.treasure import gem, heart, potion
from hotloop.apps.sprites.shapes.weapons import axe, key, shield, sword

_ALL = (
    *(creature, ghost, skull, sword, axe, shield, potion, gem),
    *(heart, key, tree, mushroom, flower, ship, fish, house),
)
DRAWINGS = {drawing.__name__: drawing for drawing in _ALL}
