"""The recipes and configs that `tune ls` shows; installed as `torchtune_grpo.recipes`."""
