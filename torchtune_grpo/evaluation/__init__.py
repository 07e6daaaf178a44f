"""What a policy is worth on held-out prompts, and how sure that is."""
