"""Predictions to draw, and what was drawn."""

import torch

from bayesify import metrics


def logits_and_labels(n=300, classes=4, samples=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    honest = 2 * torch.randn(n, classes, generator=generator)
    labels = torch.multinomial(honest.softmax(1), 1, generator=generator).squeeze(1)
    return 2 * honest + torch.randn(samples, n, classes, generator=generator), labels


LOGITS, LABELS = logits_and_labels()
PROBS = LOGITS.softmax(-1).mean(0)
FITTED = metrics.fit_temperature(LOGITS, LABELS)
