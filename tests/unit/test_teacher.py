"""A teacher's advantages are the reverse KL's gradient, its log-probs full logits', and its errors.

Whether a step is the same however it is cut: tests/recipes/test_invariance.py.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hf_models import hf_folder
from hf_tokenizers import write_tokenizer
from policies import build_policy, response_rows
from runs import tiny_overrides
from trajectories import make_groups

from torchtune_grpo.advantages import all_wrong
from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.machine import parallel
from torchtune_grpo.rewards.score import RewardScores
from torchtune_grpo.run import Run
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.reference import FrozenReference
from torchtune_grpo.training.teacher import Teacher, token_advantages

CONFIG = "hf_lora_grpo"
TEMPLATE = "{prompt} It is {answer}."


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_is_that_of_the_reverse_kl_and_of_the_rewards(level):
    """In float64, as an expectation: each of V tokens, weighed with its probability.

    Rows 5 to 9 have the other state of the policy, and no teacher; a masked token has no number.
    """
    g = torch.Generator().manual_seed(0)
    policy, teacher = (torch.randn(2, 5, generator=g, dtype=torch.float64) for _ in range(2))
    policy.requires_grad_()
    log_p, log_q = policy.log_softmax(dim=1), teacher.log_softmax(dim=1)  # [states, V]
    advantages = torch.randn(10, generator=g, dtype=torch.float64)
    coeffs = torch.tensor([0.7] * 5 + [0.0] * 5, dtype=torch.float64)
    value = (log_p[0].exp() * (0.7 * (log_p - log_q)[0] - advantages[:5])).sum()
    value = value - (log_p[1].exp() * advantages[5:]).sum()
    (expected,) = torch.autograd.grad(value, policy, retain_graph=True)

    new = torch.cat([log_p[0], log_p[1]])[:, None].expand(-1, 2)  # [10, 2], the second is masked
    mask = torch.tensor([True, False]).expand(10, 2)
    rows = replace(
        make_groups([1], [2] * 10),
        advantages=advantages,
        teacher_coeffs=coeffs,
        teacher_logprobs=torch.cat([log_q[0], log_q[1]])[:, None]
        .expand(-1, 2)
        .where(mask, torch.nan),
        response_mask=mask,
    )
    tokens = token_advantages(rows, new)
    loss = GRPOLoss(kl_coeff=0, importance_sampling_level=level)
    output = loss(
        logprobs=new,
        old_logprobs=new.detach(),
        ref_logprobs=None,
        advantages=tokens,
        weights=new.detach().exp(),
        response_mask=mask,
    )
    (found,) = torch.autograd.grad(output.loss, policy)
    torch.testing.assert_close(found, expected)


def test_a_group_is_all_wrong_if_an_outcome_is_known_and_none_is_right():
    nan = torch.nan
    outcomes = torch.tensor([0.0, 0, 0, 1, nan, -1, nan, nan, nan, 0.5])
    marked = all_wrong(outcomes, group_size=2).view(-1, 2)
    assert marked.tolist() == [[x, x] for x in (True, False, True, False, False)]


@pytest.mark.parametrize("hashes", [(1, 2), (2, 1), (1, 1)], ids=str)
def test_frozen_models_are_sharded_once_each_and_in_one_order(hashes, monkeypatch):
    """Ranks shard together, and in each of them objects have other addresses, so other hashes."""
    sharded = []

    class Frozen(SimpleNamespace):
        def __hash__(self):
            return self.hash

        def shard(self, settings, *, device):
            sharded.append(self.name)

    names = ("reference", "teacher")
    models = [Frozen(name=name, hash=value) for name, value in zip(names, hashes, strict=True)]
    if hashes == (1, 1):  # the teacher is the reference
        models[1] = models[0]
    run = object.__new__(Run)
    run.cfg = read_config(load_config("tiny_arithmetic_grpo"))
    run.is_sharded, run.device = True, torch.device("cpu")
    run.teacher = SimpleNamespace(model=models[1])
    monkeypatch.setattr(parallel, "shard", lambda *args, **settings: None)
    run.prepare_passes(torch.nn.Identity(), models[0])
    assert sharded == [*dict.fromkeys(model.name for model in models)]


def test_a_recipe_that_knows_no_teacher_is_told_so():
    """As a fork of one from before there were teachers, which would train without it."""
    run = object.__new__(Run)
    run.teacher = Teacher(read_config(load_config("tiny_arithmetic_grpo")), encode, decider="right")
    with pytest.raises(ValueError, match="^objective.teacher: .*does not call run.build_teacher"):
        run.prepare_passes(torch.nn.Identity(), None)


def encode(prompt):
    return [ord(letter) % 8 for letter in prompt]


def config(folder, *more):
    """Load a tiny config with keys of ``objective.teacher``."""
    keys = [f"objective.teacher.{key}" for key in more]
    return load_config(CONFIG, [*tiny_overrides(CONFIG, folder), *keys])


def test_its_logprobs_are_those_of_full_logits_after_its_own_prompt(tmp_path):
    """For the rows that it teaches: those of the first group, in which none is right."""
    teaches = [f"prompt_template='{TEMPLATE}'", "groups=all_wrong", "coeff=0.5", "alone=true"]
    cfg = read_config(config(tmp_path, *teaches)).replace(grpo_samples=2)
    teacher, policy = Teacher(cfg, encode, decider="right"), build_policy()
    teacher.model = FrozenReference(policy)
    rows = make_groups([4, 3], [5, 1, 3, 2])
    rows = replace(
        rows,
        prompts=["2+2?", "2+2?", "7?", "7?"],
        columns={"answer": ["4", "4", "7", "7"]},
        advantages=torch.tensor([0.5, -0.5, 1.0, -1.0]),
    )
    outcome = torch.tensor([[0.0], [0.0], [1.0], [0.0]])
    scores = RewardScores(["right"], outcome, torch.ones(1), outcome[:, 0], [0.0], outcome > 9)
    rows = teacher.choose(rows, scores, torch.ones(4, dtype=torch.bool))
    assert rows.teacher_coeffs.tolist() == [0.5, 0.5, 0, 0] and not rows.advantages.any()
    assert rows.is_informative.tolist() == [True, True, False, False]
    taught = teacher.prompted(rows.select(rows.teacher_coeffs > 0))
    assert taught.response_ids == rows.response_ids[:2]
    for row, response in enumerate(taught.response_ids):
        expected = encode("2+2? It is 4.") + response
        assert taught.tokens[row, : len(expected)].tolist() == expected
    bare = config(tmp_path, "prompt_template='{prompt} Hm.'")  # which needs no columns
    alone = Teacher(read_config(bare), encode, decider="right").prompted(replace(rows, columns={}))
    assert alone.prompt_lengths.tolist() == [8, 8, 6, 6]
    parts = micro_batches(taught, group_size=2, pack=True, rows=2)
    found = teacher.model.logprobs(parts, temperature=0.8)
    expected = response_rows(policy, taught, 0.8)[0].float()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


NOT_OF_THE_POLICY = [
    (["model_dir=/no/such"], "objective.teacher.model_dir=/no/such: .*/no/such does not exist"),
    (
        ["model_dir={other}"],
        "other: lacks the policy's tokens .[0-9]+ differ, such as '.+'.; give",
    ),
    (
        ["prompt_template='{prompt} {gold}'"],
        "prompt_template=.*no column 'gold' among .'answer', 'num",
    ),
    (["prompt_template='{prompt} {answer'"], "prompt_template=.*Write literal braces as {{ and }}"),
    (
        [f"prompt_template='{'long ' * 400}{{answer}}'"],
        "longest prompt of objective.teacher, .*short",
    ),
]


@pytest.mark.parametrize(("keys", "said"), NOT_OF_THE_POLICY, ids=lambda x: str(x)[:40])
def test_what_does_not_fit_the_policy_is_named(keys, said, tmp_path):
    """The other model has the tokenizer of another family."""
    other = tmp_path / "other"
    if "{other}" in keys[0]:
        write_tokenizer(hf_folder("llama2", other, vocab_size=400), "smollm2")
    (problem,) = Run(
        config(tmp_path, *(key.replace("{other}", str(other)) for key in keys))
    ).check()[0]
    assert re.search(said, problem)
