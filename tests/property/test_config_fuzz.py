"""Broken configs fail before a weight is read, with a ValueError that names the key.

What cannot work is said here by kinds of keys, written by hand from the docs, and not by the checks
of the code. What a component accepts itself is not among it. ``CONFIG_FUZZ=1000`` tries that many
cases in each test.
"""

import os
import random
import re
from collections import Counter
from math import inf, nan

import pytest
from omegaconf import OmegaConf
from runs import tiny_overrides

from recipes.grpo_full_finetune import GRPOFullFinetuneRecipe
from torchtune_grpo.checkpoint import Checkpoints
from torchtune_grpo.config.command_line import apply_override, load_config
from torchtune_grpo.data import load as _load

HUGE = 10**30
NO_NUMBER = ["abc", "", True, [1], {"a": 1}, {}]
NO_TEXT = [5, 2.5, True, ["abc"], {"a": "b"}, {}]
NO_NODE = ["abc", 5, True, [1], {}, {"_component_": None}, {"_component_": 7}, {"_component_": ""}]
NO_NODE += [{"_component_": "no.such.thing"}, {"_component_": "torch.optim.AdamX"}]
NO_NODE += [{"_component_": "math.pi"}]
# What a key of a kind cannot take; a kind ending in ? takes null.
BAD = {
    "count": [*NO_NUMBER, 0, -1, 2.5, inf, nan, HUGE],
    "count0": [*NO_NUMBER, -1, 2.5, inf, nan, HUGE],
    "positive": [*NO_NUMBER, 0, -1.0, inf, nan, 1e39],
    "positive0": [*NO_NUMBER, -1.0, inf, nan, 1e39],
    "share": [*NO_NUMBER, -0.1, 1.1, inf, nan],
    "flag": ["maybe", 3, 0.5, [True], {"a": 1}, {}],
    "word": [*NO_TEXT, "", "no_such_word"],
    "text": NO_TEXT,
    "path": [*NO_TEXT, ""],
    "node": NO_NODE,
    "keys": ["abc", 5, True, [1], {"no_such_key": 1}],
}
NEGATIVE = ["abc", "", {"a": 1}, {}, -1.0, nan]  # what all optimizers refuse themselves
COMMON = {
    "output_dir": "path", "output_dir ": ["/proc/no/such", "/dev/null/x"],
    "max_reward_failure_share": "share", "batch_size": "count", "grpo_samples": "count",
    "grpo_samples ": [1], "max_generated_tokens": "count", "temperature": "positive",
    "objective.advantage": "word", "objective.multi_objective_aggregation": "word",
    "objective.mask_truncated_completions": "flag", "num_steps": "count", "ppo_epochs": "count",
    "forward_batch_size": "count?", "forward_token_budget": "count?", "pack_groups": "flag",
    "clip_grad_norm": "positive?", "device": "word", "dtype": "word", "seed": "count0",
    "compile": "flag", "enable_activation_checkpointing": "flag",
    "evaluation.every_n_steps": "count?",
    "evaluation.samples": "count0", "evaluation.reward": "word?", "saving.every_n_steps": "count?",
    "saving.keep_last": "count?", "saving.adapter_weights_only": "flag",
    "resume_from_checkpoint": "flag", "log_groups": "count0",
    "prepare": "node?", "tokenizer": "node", "checkpointer": "node", "model": "node",
    "dataset": "node", "loss": "node", "optimizer": "node", "lr_scheduler": "node?",
    "eval_dataset": "node?", "metric_logger": "node", "profiler": "node?",
    "rewards": ["abc", 5, [], {}, [5], [{}], [{"_component_": 5}], None],
    "sampling": "keys", "rollout": "keys", "distributed": "keys", "objective": "keys",
    "evaluation": "keys", "saving": "keys",
    "sampling.top_k": "count?", "sampling.top_p": "share?", "sampling.min_p": "share?",
    "sampling.repetition_penalty": "positive", "sampling.min_new_tokens": "count0",
    "sampling.suppressed_tokens": ["abc", 5, [-1], [10**6], [HUGE], ["a"], [2.5], [True], None],
    "sampling.stop_strings": ["abc", 5, [3], [""], [None], [["a"]], {"a": 1}, None],
    "rollout.engine": "word", "rollout.max_rows": "count?", "rollout.merge_adapters": "word",
    "rollout.cuda_graphs": "word", "rollout.deadline": "positive?",
    "adapter_dir": "path?", "distributed.sharding": "word", "distributed.cpu_offload": "flag",
    "objective.sampling_correction": "word?", "objective.correction_cap": "positive",
    "loss.kl_coeff": "positive0", "loss.epsilon_low": "share", "loss.epsilon_high": "positive0",
    "loss.importance_sampling_level": "word", "loss.surrogate": "word", "loss.dual_clip":
    "positive?", "loss.kl_estimator": "word", "loss.aggregation": "word", "loss.entropy_coeff":
    "positive0",
    "optimizer.lr": NEGATIVE, "optimizer.weight_decay": NEGATIVE, "optimizer.eps": NEGATIVE,
    "optimizer.betas": [[0.9], 0.9, [1.5, 0.9], [-1, 0.9], ["a", "b"], [nan, 0.9]],
    "lr_scheduler.num_warmup_steps": [*NO_NUMBER, inf, nan], "lr_scheduler.num_cycles":
    [*NO_NUMBER, inf, nan],
    "checkpointer.checkpoint_dir": "path", "checkpointer.checkpoint_files":
    ["abc", 5, [3], [], {}, ["no_such_file"], {"filename_format": "x"}, None],
    "checkpointer.model_type": "word", "tokenizer.path": "path",
    "checkpointer.model_type ": ["GEMMA2", "PHI4", "T5_ENCODER"],
    "tokenizer.special_tokens_path": ["/no/such/file", 5, [1]],
    "tokenizer.max_seq_len": [*NO_NUMBER, -1, 0, inf, nan],
    "metric_logger.log_dir": [5, [1], {"a": 1}, None, "/dev/null/x"],
    "profiler.enabled": "flag",
    "rewards.0.weight": ["abc", True, None, [1], inf, nan, 1e39],
    "rewards.0.name": [5, "", [1], {"a": 1}], "rewards.0.format": [5, "html", [1]],
    "rewards.0.isolation": ["thread", 5, [1]], "rewards.0._component_": ["no.such", 5, ""],
}  # fmt: skip
for _node in ("dataset", "eval_dataset"):
    COMMON |= {
        f"{_node}.max_prompt_tokens": BAD["count"][:-1], f"{_node}.num_samples": BAD["count"][:-1],
        f"{_node}.split": "path", f"{_node}.source": "path", f"{_node}.prefill": "text?",
        f"{_node}.system_prompt": "text?", f"{_node}.chat": "flag", f"{_node}.columns":
        [3, "abc", [1], {"a": "no_such_column"}], f"{_node}.prompt_column": "word",
        f"{_node}.prompt_template": [5, True, ["a"], "{no_such_column}", "none", "{"],
        f"{_node}.data_files": ["/no/such/file", 5, []],
    }  # fmt: skip
LORA = {
    "model.lora_rank": [*NO_NUMBER, -1, 2.5, inf, nan], "model.lora_alpha": [*NO_NUMBER, inf, nan],
    "model.lora_dropout": [*NO_NUMBER, 1.5, inf, nan], "model.lora_attn_modules":
    ["q_proj", 5, [3], ["q_prj"], [["q_proj"]], None], "model.apply_lora_to_mlp": "flag",
    "model.use_dora": "flag", "model.quantize_base": "flag",
}  # fmt: skip
SHAPE = {"model.num_layers": "count", "model.embed_dim": "count", "model.vocab_size": "count"}
SHAPE |= {"model.num_heads": "count", "model.num_heads ": [3], "model.vocab_size ": [64, 10**6]}
SHAPE |= {"model.embed_dim ": [250], "model.num_layers ": [1, 3], "model.num_kv_heads": [3, "a"]}
REQUIRED = ["output_dir", "tokenizer", "checkpointer", "model", "dataset", "rewards", "loss"]
REQUIRED += ["batch_size", "grpo_samples", "max_generated_tokens", "num_steps", "optimizer"]
REQUIRED += ["metric_logger", "checkpointer.checkpoint_dir", "checkpointer.checkpoint_files"]
REQUIRED += ["checkpointer.model_type", "tokenizer.path", "lr_scheduler.num_warmup_steps"]
REQUIRED += ["metric_logger.log_dir"]
KINDS = {
    "llama3_2_1B_lora_grpo": COMMON | LORA | SHAPE,
    "llama3_2_1B_full_grpo": COMMON | SHAPE,
    "qwen2_5_0_5B_code_grpo": COMMON | LORA,
}
MISSING = "(missing)"


def misspelt(path):
    head, dot, name = path.rpartition(".")
    return [f"{head}{dot}{name}s", f"{head}{dot}{name[:1]}_{name[1:]}"]


def all_cases():
    """(config, key, value) of everything that cannot work."""
    cases = []
    for config, kinds in KINDS.items():
        for key, kind in kinds.items():
            values = kind
            if isinstance(kind, str):
                values = [*BAD[kind.rstrip("?")], *([] if kind.endswith("?") else [None])]
            cases += [(config, key.strip(), value) for value in values]
        names = [key for key in kinds if not key.endswith(" ")]
        # rewards are a list; DiskLogger, CodeReward's columns and so on take any argument
        known = [key for key in names if not key.startswith(("rewards.", "metric_logger."))]
        cases += [(config, other, 1) for key in known for other in misspelt(key)]
        cases += [(config, key, MISSING) for key in REQUIRED]
    # Harmless, or taken for another thing: null paths, a flag's null, keys without a range.
    cases = [case for case in cases if not (case[2] is None and _flag(case[1]))]
    return cases


def _flag(key):
    return COMMON.get(key, LORA.get(key)) == "flag" and "." in key


class Reached(Exception):
    """The weights would have been read."""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function that starts a tiny run of a config with changes, up to the weights."""
    folder = tmp_path_factory.mktemp("fuzz")
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    loaded, load = {}, _load.load_dataset

    def load_once(*args, **kwargs):
        key = repr((args, kwargs))
        if key not in loaded:
            loaded[key] = load(*args, **kwargs)
        return loaded[key]

    def stop(_):
        raise Reached

    patch.setattr(_load, "load_dataset", load_once)
    patch.setattr(Checkpoints, "base_weights", stop)
    bases = {}
    for config in KINDS:
        (folder / config).mkdir()
        cfg = load_config(config)
        cfg.merge_with_dotlist(tiny_overrides(config, folder / config))
        bases[config] = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))

    def run(config, *changes):
        cfg = bases[config].copy()
        for key, value in changes:
            if value is MISSING:
                apply_override(cfg, f"~{key}")
            elif isinstance(key, int):
                cfg[key] = value
            else:
                OmegaConf.update(cfg, key, value, merge=False, force_add=True)
        recipe = GRPOFullFinetuneRecipe(cfg)
        recipe.setup(cfg)

    yield run
    patch.undo()


def fate(start, config, *changes):
    """ "named", or what went wrong."""
    try:
        start(config, *changes)
    except ValueError as error:
        if any(names(str(error), str(key)) for key, _ in changes):
            return "named"
        return f"not named: {error}"
    except Reached:
        return "too late"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "too late"


def names(message, key):
    """The dotted path, or the argument of its node."""
    message = re.sub(r"(rewards\[\d+\]) \(\w+\)", r"\1", message)
    for path in (key, re.sub(r"\.(\d+)", r"[\1]", key), key.rpartition(".")[2]):
        if re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", message):
            return True
    return False


def some(cases, number):
    number = int(os.environ.get("CONFIG_FUZZ", number))
    return random.Random(number).sample(cases, min(number, len(cases)))


def test_the_configs_themselves_reach_the_weights(start):
    assert [fate(start, config) for config in KINDS] == ["too late"] * len(KINDS)


def test_what_cannot_work_fails_early_and_is_named(start):
    cases = some(all_cases(), 120)
    fates = [(case, fate(start, case[0], case[1:])) for case in cases]
    slipped = [f"{case}: {what[:200]}" for case, what in fates if what != "named"]
    counts = dict(Counter(what.partition(":")[0] for _, what in fates))
    assert len(slipped) <= 0.01 * len(cases), "\n".join([str(counts), *slipped])


def test_anything_anywhere_is_a_value_error_or_harmless(start):
    """Values that may well work, too: none ends in another exception before the weights."""
    junk = [*(v for values in BAD.values() for v in values), None, "???", "${no.such}", "null"]
    junk += [1e-300, -HUGE, 1, "1", "text\0", {1: 2}, [[]], "${seed}", "/", "."]
    cases = [(c, k.strip(), v) for c, kinds in KINDS.items() for k in kinds for v in junk]
    cases += [(c, k, 1) for c in KINDS for k in (7, "true", "dataset.x.y", "model.7")]
    fates = [(case, fate(start, case[0], case[1:])) for case in some(cases, 60)]
    known = ("named", "not named", "too late")
    assert not [f"{case}: {what[:200]}" for case, what in fates if not what.startswith(known)]
