"""Whatever a key is set to: it is read, or refused in an error that names it.

Components check their arguments themselves: test_config.py has mistakes in those.
"""

import re
from math import inf, nan

import pytest
from omegaconf import OmegaConf

from torchtune_grpo.config.check import key_paths, read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import ConfigError

KEYS = [path for path, _ in key_paths(GRPOConfig)]
NEVER = [-1, -0.1, inf, nan, 1e39, [[1]], {1: 2}, {"no_such_key": 1}]  # what none of them takes
NO_NUMBER = ["no_such_word", "no.such.thing", "", [], ["abc"], {}]
VALUES = [*NEVER, *NO_NUMBER, None, True, 0, 2.5, 10**30, "1", "${seed}", {"_component_": 7}]
BASE = load_config("llama3_2_1B_lora_grpo")


def refusal(key: str, value: object) -> str | None:
    """Return what is said of a config with a change; nothing if it is read."""
    cfg = BASE.copy()
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    try:
        read_config(cfg)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_a_value_is_read_or_its_key_is_named(key):
    """What takes a number takes no text, list or section; a misspelt key is named, too."""
    taken = []
    for value in VALUES:
        if (said := refusal(key, value)) is None:
            taken.append(value)
        else:
            name = key.rpartition(".")[2]
            assert re.search(rf"(?<!\w){name}(?!\w)", said), (value, said)
    of_component = key.startswith("environment")  # which may take any argument
    assert of_component or not [v for v in taken if any(v is never for never in NEVER)]
    if any(type(value) in (int, float) for value in taken):
        assert not [value for value in taken if value in NO_NUMBER]
    for other in (f"{key}s", f"{key[:-1]}_{key[-1]}"):
        assert of_component or f"{other}=1: unknown config key" in str(refusal(other, 1))
