"""Broken configs fail before a weight is read, with a ValueError that names the key.

What cannot work is said here by kinds of keys, written by hand from the docs, and not by the checks
of the code. Misspelt and missing keys, and values of no kind, have tests of their own:
test_config.py, test_reward_calls.py and test_rl_dataset.py. ``CONFIG_FUZZ=1000`` tries that many
cases in each test.
"""

import os
import random
import re
from math import inf, nan

import pytest
from omegaconf import OmegaConf
from runs import tiny_overrides

from torchtune_grpo.checkpoint.checkpoints import Checkpoints
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.recipes.grpo_full_finetune import GRPOFullFinetuneRecipe

HUGE = 10**30
NO_NUMBER = ["abc", "", True, [1], {"a": 1}, {}]
NO_TEXT = [5, 2.5, True, ["abc"], {"a": "b"}, {}]
NO_NODE = ["abc", 5, True, [1], {}, {"_component_": None}, {"_component_": 7}, {"_component_": ""}]
NO_NODE += [{"_component_": "no.such.thing"}, {"_component_": "torch.optim.AdamX"}]
NO_NODE += [{"_component_": "math.pi"}]
# What a key of a kind cannot take.
BAD = {
    "count": [*NO_NUMBER, 0, -1, 2.5, inf, nan, HUGE],
    "count0": [*NO_NUMBER, -1, 2.5, inf, nan, HUGE],
    "size": [*NO_NUMBER, 0, -1, 2.5, inf, nan],
    "positive": [*NO_NUMBER, 0, -1.0, inf, nan, 1e39],
    "positive0": [*NO_NUMBER, -1.0, inf, nan, 1e39],
    "share": [*NO_NUMBER, -0.1, 1.1, inf, nan],
    "flag": ["maybe", 3, 0.5, [True], {"a": 1}, {}],
    "word": [*NO_TEXT, "", "no_such_word"],
    "text": NO_TEXT,
    "path": [*NO_TEXT, ""],
    "node": NO_NODE,
    "keys": ["abc", 5, True, [1], {"no_such_key": 1}, None],
    "learning": ["abc", "", {"a": 1}, {}, -1.0, nan],  # what all optimizers refuse themselves
}
# The keys of each kind; those of one that ends in ? take null, too.
KEYS = """
count: batch_size grpo_samples max_generated_tokens num_steps ppo_epochs
count: model.num_layers model.embed_dim model.vocab_size model.num_heads
count?: forward_batch_size evaluation.every_n_steps saving.every_n_steps
count?: saving.keep_last sampling.top_k rollout.max_rows
count0: seed evaluation.samples log_groups sampling.min_new_tokens
size?: dataset.max_prompt_tokens dataset.num_samples
positive: temperature sampling.repetition_penalty objective.correction_cap
positive?: clip_grad_norm rollout.deadline loss.dual_clip
positive0: loss.kl_coeff loss.entropy_coeff
positive0?: loss.epsilon_high
share: max_reward_failure_share
share?: sampling.top_p sampling.min_p loss.epsilon_low
flag: pack_groups enable_activation_checkpointing resume_from_checkpoint
flag?: objective.mask_truncated_completions saving.adapter_weights_only
flag?: dataset.chat profiler.enabled model.apply_lora_to_mlp model.use_dora model.quantize_base
word: objective.advantage objective.multi_objective_aggregation device dtype distributed.sharding
word: rollout.engine rollout.engine.merge_adapters rollout.engine.cuda_graphs
word: checkpointer.model_type
word: loss.importance_sampling_level loss.surrogate loss.kl_estimator loss.aggregation
word: dataset.prompt_column
word?: deciding_reward objective.sampling_correction
text?: dataset.prefill dataset.system_prompt
path: output_dir checkpointer.checkpoint_dir tokenizer.path dataset.split dataset.source
node: tokenizer checkpointer model dataset loss optimizer metric_logger
node?: prepare lr_scheduler eval_dataset profiler
keys: sampling rollout distributed objective evaluation saving
learning?: optimizer.lr optimizer.weight_decay optimizer.eps
"""
CONFIGS = ["llama3_2_1B_lora_grpo", "qwen2_5_0_5B_code_grpo"]


def bad_values() -> dict[str, list]:
    """Each key's."""
    values = {}
    for line in KEYS.strip().splitlines():
        kind, _, keys = line.partition(": ")
        null = [] if kind.endswith("?") else [None]
        values |= {key: [*BAD[kind.rstrip("?")], *null] for key in keys.split()}
    both = {f"eval_{key}": bad for key, bad in values.items() if key.startswith("dataset.")}
    return values | both


class Reached(Exception):
    """The weights would have been read."""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function that starts a tiny run of a config with a change, up to the weights."""
    folder = tmp_path_factory.mktemp("fuzz")
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)

    def stop(_, model):
        raise Reached

    patch.setattr(Checkpoints, "base_weights", stop)
    patch.setattr("datasets.config.HF_HUB_OFFLINE", True)  # the hub is not asked for any name
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    bases = {}
    for config in CONFIGS:
        (folder / config).mkdir()
        cfg = load_config(config)
        cfg.merge_with_dotlist(tiny_overrides(config, folder / config))
        bases[config] = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))

    def run(config, key, value):
        cfg = bases[config].copy()
        if isinstance(key, int):
            cfg[key] = value
        else:
            OmegaConf.update(cfg, key, value, merge=False, force_add=True)
        recipe = GRPOFullFinetuneRecipe(cfg)
        recipe.setup(cfg)

    yield run
    patch.undo()


def fate(start, config, key, value):
    """ "named", or what went wrong."""
    try:
        start(config, key, value)
    except ValueError as error:
        return "named" if names(str(error), str(key)) else f"not named: {error}"
    except Reached:
        return "too late"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "too late"


def names(message, key):
    """The dotted path, or the argument of its node."""
    for path in (key, key.rpartition(".")[2]):
        if re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", message):
            return True
    return False


def some(cases, number):
    number = int(os.environ.get("CONFIG_FUZZ", number))
    return random.Random(number).sample(cases, min(number, len(cases)))


@pytest.mark.slow
def test_the_configs_themselves_reach_the_weights(start):
    assert [fate(start, config, "seed", 1) for config in CONFIGS] == ["too late", "too late"]


@pytest.mark.slow
def test_what_cannot_work_fails_early_and_is_named(start):
    cases = [(c, key, bad) for c in CONFIGS for key, all_ in bad_values().items() for bad in all_]
    fates = [(case, fate(start, *case)) for case in some(cases, 60)]
    slipped = [f"{case}: {what[:200]}" for case, what in fates if what != "named"]
    assert not slipped, "\n".join(slipped)


@pytest.mark.slow
def test_anything_anywhere_is_a_value_error_or_harmless(start):
    """Values that may well work, too: none ends in another exception before the weights."""
    junk = [*(v for values in BAD.values() for v in values), None, "???", "${no.such}", "null"]
    junk += [1e-300, -HUGE, 1, "1", "text\0", {1: 2}, [[]], "${seed}", "/", "."]
    cases = [(c, k, v) for c in CONFIGS for k in bad_values() for v in junk]
    cases += [(c, k, 1) for c in CONFIGS for k in (7, "true", "dataset.x.y", "model.7")]
    fates = [(case, fate(start, *case)) for case in some(cases, 30)]
    known = ("named", "not named", "too late")
    assert not [f"{case}: {what[:200]}" for case, what in fates if not what.startswith(known)]
