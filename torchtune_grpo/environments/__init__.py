"""Rollouts of several turns: tools and environments, and what they say to the policy."""
