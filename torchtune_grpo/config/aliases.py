"""Names that TRL, verl, unsloth and others have for the keys of a config.

The error for another library's key names ours. Not only names differ:

- A step has `batch_size` prompts on each rank, with `grpo_samples` completions each. TRL's
  `per_device_train_batch_size` counts completions.
- `forward_batch_size`, the rows in a forward pass, changes memory and time, not the step, so there
  is no `gradient_accumulation_steps`.
- A run's length is `num_steps`, not passes over the data.
- Reward functions have TRL's interface (docs/rewards.md), and rows with lists of messages work as
  they are (docs/data.md).
"""

import tomllib
from importlib.resources import files

_TABLES = tomllib.loads(files("torchtune_grpo.config").joinpath("aliases.toml").read_text("utf-8"))
KEYS: dict[str, list[str]] = _TABLES["keys"]
NO_KEY: dict[str, list[str]] = _TABLES["no_key"]
_MEANINGS = {
    name: text.format(ours)
    for table, text in ((KEYS, " Did you mean {}?"), (NO_KEY, " There is no key for it: {}."))
    for ours, names in table.items()
    for name in names
}


def meaning(name: str, *, ends: bool = False) -> str | None:
    """Say what another library's key is called here; ``ends``: its last parts may match, too."""
    parts = name.split(".")
    tried = (".".join(parts[start:]) for start in range(len(parts) if ends else 1))
    return next((_MEANINGS[part] for part in tried if part in _MEANINGS), None)


def markdown() -> str:
    """Return this module's text above, and the table."""
    rows = [f"# Coming from another library\n\n{__doc__}\n| Their name | Here |", "|---|---|"]
    for table, here in ((KEYS, ""), (NO_KEY, "no key: ")):
        for ours, names in table.items():
            rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {here}{ours} |")
    return "\n".join(rows)
