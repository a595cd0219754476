"""The colours that have a name here: what the built-in model's objects are painted in and judged by."""

from __future__ import annotations

COLOUR_RGB = {
    "red": (220, 30, 30),
    "orange": (255, 140, 0),
    "yellow": (250, 225, 40),
    "green": (30, 160, 60),
    "blue": (30, 70, 220),
    "purple": (130, 40, 170),
    "pink": (255, 130, 190),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
