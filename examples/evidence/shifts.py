"""Shifted data: the same images and sentences, damaged at five levels."""

import math
import random

import torch
from torch.nn import functional as F

LEVELS = 5


def levels(count):
    """Return the level of each item, 1 to 5 in turns: all levels cost one pass together."""
    return torch.arange(count) % LEVELS + 1


def kinds(count):
    """Return which of two damages each item gets; every level has both."""
    return torch.arange(count) // LEVELS % 2


def rotated_or_noisy(images, seed):
    """Rotate by 12 degrees per level, or add noise of deviation 0.1 per level; images are (N, 1, H, W) in [0, 1]."""
    level, kind = levels(len(images)), kinds(len(images))
    angle = level * math.pi / 15
    turn = torch.zeros(len(images), 2, 3)
    turn[:, 0, 0], turn[:, 0, 1], turn[:, 1, 0], turn[:, 1, 1] = angle.cos(), -angle.sin(), angle.sin(), angle.cos()
    rotated = F.grid_sample(images, F.affine_grid(turn, list(images.shape), align_corners=False), align_corners=False)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    noisy = (images + 0.1 * level.view(-1, 1, 1, 1) * noise).clamp(0, 1)
    return torch.where(kind.view(-1, 1, 1, 1) == 0, rotated, noisy)


def blurred_or_dark(images):
    """Blur with a Gaussian of 0.8 pixels per level, or take 17 % of the light per level; images are in [-1, 1]."""
    from torchvision.transforms.functional import gaussian_blur

    out = []
    for image, level, kind in zip(images, levels(len(images)).tolist(), kinds(len(images)).tolist(), strict=True):
        dark = (image + 1) * (1 - 0.17 * level) - 1
        out.append(dark if kind else gaussian_blur(image, [4 * level + 1] * 2, [0.8 * level] * 2))
    return torch.stack(out)


def with_typos(texts, seed):
    """Damage words with probability 8 % per level: two letters change places, one is lost, or one is another."""
    chance, out = random.Random(seed), []
    for text, level in zip(texts, levels(len(texts)).tolist(), strict=True):
        words = [_typo(word, chance) if chance.random() < 0.08 * level else word for word in text.split()]
        out.append(" ".join(words))
    return out


def _typo(word, chance):
    if len(word) < 3:
        return word
    i, kind = chance.randrange(len(word) - 1), chance.randrange(3)
    if kind == 0:
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    return word[:i] + ("" if kind == 1 else chance.choice("abcdefghijklmnopqrstuvwxyz")) + word[i + 1 :]
