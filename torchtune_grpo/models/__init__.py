"""A model from its folder, as the hub has it: builders, weights and tokenizer, by config.json."""

__all__: list[str] = []
