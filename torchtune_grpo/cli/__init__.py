"""The command ``torchtune-grpo``, and what makes ``tune`` know the recipes."""
