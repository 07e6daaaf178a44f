"""What other libraries call our keys: aliases.toml, which docs/coming_from.md shows as a table."""

import tomllib
from importlib.resources import files

_TABLES = tomllib.loads(files("torchtune_grpo.config").joinpath("aliases.toml").read_text("utf-8"))
KEYS: dict[str, list[str]] = _TABLES["keys"]
NO_KEY: dict[str, list[str]] = _TABLES["no_key"]
_MEANINGS = {
    name: text.format(ours)
    for table, text in ((KEYS, "Did you mean {}?"), (NO_KEY, "There is no key for it: {}."))
    for ours, names in table.items()
    for name in names
}


def meaning(name: str, *, ends: bool = False) -> str | None:
    """Say what another library's key is called here; ``ends``: its last parts may match, too."""
    parts = name.split(".")
    tried = (".".join(parts[start:]) for start in range(len(parts) if ends else 1))
    return next((_MEANINGS[part] for part in tried if part in _MEANINGS), None)
