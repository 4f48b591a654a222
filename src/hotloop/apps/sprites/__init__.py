"""Pixel art: 16x16 sprites made, imported, sorted and drawn. It sits beside the library, which never imports it."""
