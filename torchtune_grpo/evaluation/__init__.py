"""Measurement of a policy on held-out prompts, and its uncertainty."""
