"""Predictions with the posterior, and what they hold."""
