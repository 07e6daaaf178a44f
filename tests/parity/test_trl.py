"""Loss, gradients and advantages equal those of TRL's GRPOTrainer where both have the option.

TRL's trainer is real: a tiny Llama in transformers, the same weights as ours. Its methods
``_generate_and_score_completions`` (advantages) and ``compute_loss`` are what its training calls.
"""

import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, llama_checkpoint
from datasets import Dataset
from hf_models import load
from tokenizers import Tokenizer, models, pre_tokenizers
from trajectories import make_groups
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torchtune_grpo.advantages import reward_advantages
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.models.layers import attend_in_segments
from torchtune_grpo.models.weights import hf_state
from torchtune_grpo.rewards import RewardFailure, RewardSet
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.packing import packed_layout
from torchtune_grpo.trajectory import Trajectory, length_mask

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about optional packages
    from trl import GRPOConfig, GRPOTrainer

LIMIT, GROUP, TEMPERATURE = 9, 3, 0.8
RESPONSES = [4, 9, 1, 7, 9, 2]
NAN = float("nan")
TRUNCATED = [False, True, False, False, True, False]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("trl") / "llama")


def make_trainer(folder: Path, reward=None, **options) -> GRPOTrainer:
    vocab = {f"w{i}": i for i in range(VOCAB)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "w1", "pad_token": "w2", "unk_token": "w0"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(RESPONSES),
        num_generations=GROUP,
        max_completion_length=LIMIT,
        temperature=TEMPERATURE,
        activation_checkpointing=False,
        use_bias_correction_kl=False,  # DeepSeek V3.2's weighted KL, which ours does not have
        **options,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * 8}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def make_rows() -> Trajectory:
    rows = make_groups([5, 2], RESPONSES)
    noise = torch.randn(len(RESPONSES), generator=torch.Generator().manual_seed(3))
    return replace(rows, truncated=torch.tensor(TRUNCATED), advantages=noise)


def trl_inputs(rows: Trajectory) -> dict[str, torch.Tensor]:
    """The same rows in TRL's form: prompts padded on the left, completions on the right."""
    lengths = rows.prompt_lengths.tolist()
    width = max(lengths)
    prompt_ids = torch.full((len(lengths), width), 2)
    completion_ids = torch.full((len(lengths), LIMIT), 2)
    for i, (prompt, response) in enumerate(zip(lengths, RESPONSES, strict=True)):
        prompt_ids[i, width - prompt :] = rows.tokens[i, :prompt]
        completion_ids[i, :response] = rows.tokens[i, prompt : prompt + response]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": length_mask(rows.prompt_lengths, width).flip(1).int(),
        "completion_ids": completion_ids,
        "completion_mask": rows.response_mask.int(),
        "advantages": rows.advantages,
        "num_items_in_batch": rows.response_mask.sum(),
    }


def our_step(folder: Path, rows: Trajectory, loss: GRPOLoss, **extra):
    """Loss, gradients by transformers' names, and log-probs, with packed groups."""
    model = load(folder)
    attend_in_segments(model)
    packs = [row // GROUP for row in range(len(RESPONSES))]
    options = {"entropy": "gradient" if loss.needs_entropy_gradient else "value"}
    options |= {"temperature": TEMPERATURE}
    logprobs, entropy = response_logprobs(model, packed_layout(rows, packs), **options)
    weights = loss.weights(
        rows.response_mask,
        prompt_indices=rows.prompt_indices,
        num_rows=rows.num_rows,
        num_tokens=int(rows.response_mask.sum()),
        max_generated_tokens=LIMIT,
    )
    extra |= {"advantages": rows.advantages, "response_mask": rows.response_mask}
    output = loss(logprobs=logprobs, weights=weights, entropy=entropy, **extra)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return output.loss.detach(), hf_state(grads, folder)


# TRL's option -> ours. Its cispo has one absolute upper bound, ours distances from 1.
POLICIES = {
    "token": ({}, {}),
    "token, wide": (dict(epsilon=0.1, epsilon_high=0.4), dict(epsilon_low=0.1, epsilon_high=0.4)),
    "two-sided": (dict(delta=1.5), dict(dual_clip=1.5)),
    "sequence": (
        dict(importance_sampling_level="sequence"),  # TRL keeps the distances of tokens
        dict(importance_sampling_level="sequence", epsilon_low=0.2, epsilon_high=0.2),
    ),
    "cispo": (dict(epsilon_high=1.3), dict(surrogate="cispo", epsilon_high=0.3)),
}
AGGREGATIONS = {"grpo": "grpo", "bnpo": "dapo", "dapo": "dapo", "dr_grpo": "dr_grpo"}
CASES = [
    (policy, loss_type, beta)
    for policy, loss_type, beta in itertools.product(POLICIES, AGGREGATIONS, [0.0, 0.3])
    if policy != "cispo" or loss_type == "dapo"  # TRL's cispo is a loss type with dapo's sum
]


def compare(folder: Path, trl_options: dict, loss: GRPOLoss, *, on_policy: bool = False) -> None:
    """``on_policy``: no old log-probs are given."""
    rows = make_rows()
    if trl_options.get("mask_truncated_completions"):
        rows = replace(rows, response_mask=rows.response_mask & ~rows.truncated[:, None])
    trainer = make_trainer(folder, **trl_options)
    inputs = trl_inputs(rows)
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(2, *rows.response_mask.shape, generator=generator) * 0.3
    parts = ("prompt", "completion")
    both = [torch.cat([inputs[f"{part}_{k}"] for part in parts], 1) for k in ("ids", "mask")]
    with torch.no_grad():
        current, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, *both, LIMIT)
    old = None if on_policy else current + noise[0]
    ref = current + noise[1]
    inputs |= {"ref_per_token_logps": ref} | ({} if on_policy else {"old_per_token_logps": old})
    expected = trainer.compute_loss(trainer.model, inputs)
    expected.backward()
    value, grads = our_step(folder, rows, loss, old_logprobs=old, ref_logprobs=ref)
    torch.testing.assert_close(value, expected.detach(), atol=1e-5, rtol=0)
    named = dict(trainer.model.named_parameters())
    assert sum(g.abs().max() > 1e-3 for g in grads.values()) > 10
    for name, grad in grads.items():
        if name in named:
            torch.testing.assert_close(grad, named[name].grad, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_loss_and_gradients(folder, case):
    policy, loss_type, beta = case
    theirs, ours = POLICIES[policy]
    trl_options = {"loss_type": "cispo" if policy == "cispo" else loss_type, "beta": beta, **theirs}
    loss = GRPOLoss(kl_coeff=beta, aggregation=AGGREGATIONS[loss_type], **ours)
    compare(folder, trl_options, loss)


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_on_policy_and_without_truncated_completions(folder, loss_type):
    """The paper's single update: no old log-probs are given; two of six rows are left out."""
    trl_options = dict(loss_type=loss_type, beta=0.04, mask_truncated_completions=True)
    compare(folder, trl_options, GRPOLoss(aggregation=AGGREGATIONS[loss_type]), on_policy=True)


def test_entropy_bonus(folder):
    """TRL's bonus is a mean over tokens whatever the loss type, which is our dapo's."""
    loss = GRPOLoss(kl_coeff=0, aggregation="dapo", entropy_coeff=0.2)
    compare(folder, dict(loss_type="dapo", beta=0.0, entropy_coef=0.2), loss)


REWARDS = [
    lambda i, text: float(len(set(text)) + 3 * i % 5),
    lambda i, text: 100.0 * (i % 3),
    lambda i, text: None if i % 4 == 1 else float(i % 5),  # does not apply now and then
]


@pytest.mark.parametrize(
    ("num_rewards", "options"),
    [
        (1, dict(scale_rewards="group")),
        (1, dict(scale_rewards="batch")),
        (1, dict(scale_rewards="none")),
        (3, dict(multi_objective_aggregation="normalize_then_sum")),  # GDPO
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_advantages(folder, num_rewards, options):
    """TRL samples and scores its own completions; the same rewards give the same advantages."""
    seen: list[list[float | None]] = []

    def recorded(reward):
        def call(completions, **_):
            seen.append([reward(i, text) for i, text in enumerate(completions)])
            return seen[-1]

        return call

    weights = [1.0, 0.5, 2.0][:num_rewards]
    rewards = [recorded(reward) for reward in REWARDS[:num_rewards]]
    trainer = make_trainer(folder, rewards, reward_weights=weights, **options)
    prompts = [{"prompt": prompt} for prompt in ("w5 w6", "w9") for _ in range(GROUP)]
    output = trainer._generate_and_score_completions(prompts)
    scores = torch.tensor([[NAN if v is None else v for v in column] for column in seen]).T
    assert scores.shape == (2 * GROUP, num_rewards)
    ours = {
        "normalization": options.get("scale_rewards", "group"),
        "aggregation": options.get("multi_objective_aggregation", "sum_then_normalize"),
    }
    given = (scores[:, 0], scores, torch.tensor(weights))
    expected = reward_advantages(*given, group_size=GROUP, **ours)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(output["advantages"], expected, atol=1e-5, rtol=1e-5)


def test_reward_factories():
    """Called by dotpath with the config's keys; what they make is named and scored as in TRL."""
    from trl import rewards as trl_rewards

    cosine = dict(min_value_wrong=-1.0, max_value_wrong=-0.5)
    cosine |= dict(max_len=10, min_value_correct=0.5, max_value_correct=1.0)
    settings = {
        "get_soft_overlong_punishment": dict(max_completion_len=10, soft_punish_cache=4),
        "get_repetition_penalty_reward": dict(ngram_size=2),
        "get_cosine_scaled_reward": cosine,
    }
    chat = {"format": "chat"}
    nodes = [{"_component_": f"trl.rewards.{n}", **chat, **s} for n, s in settings.items()]
    given = dict(completion_ids=[[5] * 8, [1, 2, 3, 4]], solution=[r"$\frac13$", r"$\frac12$"])
    answers = [r"It is $\boxed{\frac{1}{3}}$."] * 2
    chats = [[{"role": "assistant", "content": answer}] for answer in answers]
    theirs = [getattr(trl_rewards, name)(**made) for name, made in settings.items()]
    expected = [reward(completions=chats, prompts=[], **given) for reward in theirs]
    columns, ids = {"solution": given["solution"]}, given["completion_ids"]
    inputs = dict(prompts=["a"] * 2, completions=answers, columns=columns, completion_ids=ids)
    rewards = RewardSet.from_config(nodes)
    assert rewards.names == [reward.__name__ for reward in theirs]
    torch.testing.assert_close(rewards(**inputs).scores, torch.tensor(expected).T)
    assert all(first != second for first, second in expected)
    nodes[2].pop("format")
    with pytest.raises(RewardFailure, match="format: chat for messages"):
        RewardSet.from_config(nodes)(**inputs)
