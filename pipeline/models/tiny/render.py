"""Draws scenes with antialiased signed distances, on any device: thousands of clips a second on a card.

Shapes: N scenes, F frames, H and W pixels, P objects of one kind.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pipeline.models.tiny.scenes import BACKGROUND_RGB, NUM_FRAMES, SHAPES, Scenes


def render(scenes: Scenes, *, device: str = "cpu") -> torch.Tensor:
    """fp32 RGB in [0, 1], (N, F, H, W, 3)."""
    video_NFHWC = _background(scenes, device)
    companions = np.flatnonzero(scenes.has_companion)
    _draw(video_NFHWC, scenes, companions, 1, scenes.companion_shape, scenes.companion_colour)
    _draw(video_NFHWC, scenes, np.arange(len(scenes)), 0, scenes.shape, scenes.colour)
    return video_NFHWC


def _background(scenes: Scenes, device: str) -> torch.Tensor:
    start, end = _on(BACKGROUND_RGB[scenes.background] / 255, device).unbind(1)
    down = torch.linspace(0, 1, scenes.height, device=device)[:, None].expand(-1, scenes.width)
    across = torch.linspace(0, 1, scenes.width, device=device).expand(scenes.height, -1)
    mix_NHW = torch.stack([down, across])[_on(scenes.axis, device)]
    picture_NHWC = torch.lerp(start[:, None, None], end[:, None, None], mix_NHW[..., None])
    return picture_NHWC[:, None].repeat(1, NUM_FRAMES, 1, 1, 1)


def _draw(
    video_NFHWC: torch.Tensor,
    scenes: Scenes,
    indices: np.ndarray,
    slot: int,
    shapes: np.ndarray,
    colours: np.ndarray,
) -> None:
    """Blend one object of each indexed scene over its video. slot: 0 for the main one, 1 for the other."""
    device = str(video_NFHWC.device)
    for number, name in enumerate(SHAPES):
        chosen = indices[shapes[indices] == number]
        if not len(chosen):
            continue
        geometry = (scenes.centres[chosen, slot], scenes.radii[chosen, slot], scenes.angles[chosen, slot])
        centre_PF2, radius_PF, angle_PF = (_on(values, device) for values in geometry)
        x_PFHW, y_PFHW = _own_axes(centre_PF2, radius_PF, angle_PF, scenes.width, scenes.height)
        distance_PFHW = _DISTANCES[name](x_PFHW, y_PFHW) * radius_PF[..., None, None]
        cover_PFHW1 = (0.5 - distance_PFHW).clamp(0, 1)[..., None]
        colour_P1113 = _on(BACKGROUND_RGB[colours[chosen]] / 255, device)[:, None, None, None]
        rows = _on(chosen, device)
        video_NFHWC[rows] = torch.lerp(video_NFHWC[rows], colour_P1113, cover_PFHW1)


def _own_axes(
    centre_PF2: torch.Tensor, radius_PF: torch.Tensor, angle_PF: torch.Tensor, width: int, height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pixel's place as the object sees it: from its centre, turned with it, in radii, y downwards."""
    device = centre_PF2.device
    x_PF1W = torch.arange(width, device=device) + 0.5 - centre_PF2[..., 0, None, None]
    y_PFH1 = (torch.arange(height, device=device) + 0.5)[:, None] - centre_PF2[..., 1, None, None]
    cos, sin = ((f(angle_PF) / radius_PF)[..., None, None] for f in (torch.cos, torch.sin))
    return x_PF1W * cos + y_PFH1 * sin, y_PFH1 * cos - x_PF1W * sin


# Signed distances to shapes of about the same area as a disc of radius 0.9, in units of the radius.


def _circle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.hypot(x, y) - 0.95


def _ring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.hypot(x, y) - 0.83).abs() - 0.25


def _square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.82


def _triangle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Upright and equilateral: its three sides' half-planes, around its centroid."""
    return torch.maximum(y, x.abs() * 0.75**0.5 - y / 2) - 0.59


def _cross(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.abs(), y.abs()
    upright = torch.maximum(x - 0.34, y - 1.08)
    return torch.minimum(upright, torch.maximum(x - 1.08, y - 0.34))


def _star(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Five-pointed, one point up: folded into half a point, then the distance to its one edge's line."""
    sector = 2 * np.pi / 5
    angle = torch.atan2(x, -y)
    folded = (angle - sector * torch.round(angle / sector)).abs()
    radius = torch.hypot(x, y)
    tip, dent = 1.2, 0.55
    edge_x, edge_y = dent * np.sin(sector / 2), dent * np.cos(sector / 2) - tip
    along, across = radius * torch.cos(folded) - tip, radius * torch.sin(folded)
    return (across * -edge_y + along * edge_x) / np.hypot(edge_x, edge_y)


def _heart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A unit square on its corner with two half discs on its upper sides."""
    x, y = x.abs() / 1.45, 0.62 - y / 1.45
    lobe = torch.hypot(x - 0.25, y - 0.75) - 2**0.5 / 4
    onto_side = ((x + y) / 2).clamp(min=0)
    corner = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - onto_side, y - onto_side))
    return torch.where(x + y > 1, lobe, corner * (x - y).sign()) * 1.45


_DISTANCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
    "heart": _heart,
}


def _on(values: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
