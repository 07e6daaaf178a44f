"""A teacher's advantages are the reverse KL's gradient, its log-probs its model's, and its errors.

Whether a step is the same however it is cut: tests/recipes/test_invariance.py.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hf_models import hf_folder
from hf_tokenizers import write_tokenizer
from policies import build_policy, response_rows
from runs import NO_EVALUATION, SGD, distance, run_tiny, steps_of, tiny_overrides, weights
from safetensors.torch import save_file
from trajectories import make_groups

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.run import Run
from torchtune_grpo.training import Teacher
from torchtune_grpo.training.mini_batches import mini_batches
from torchtune_grpo.training.parts import Parts
from torchtune_grpo.training.reference import FrozenReference

CONFIG = "hf_lora_grpo"
SAME_REWARD = """
def same(prompts, completions, **columns):
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_is_that_of_the_reverse_kl_and_of_the_rewards(level, alone):
    """In float64, as an expectation: each of V tokens, weighed with its probability.

    What is masked away may be no number: a token, and the rewards' advantages of a teacher alone.
    """
    g = torch.Generator().manual_seed(0)
    policy, judge = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(2))
    policy.requires_grad_()
    log_p, log_q = policy.log_softmax(dim=0), judge.log_softmax(dim=0)  # [V]
    advantages = torch.randn(5, generator=g, dtype=torch.float64)
    of_rewards = 0 if alone else advantages
    value = (log_p.exp() * (0.7 * (log_p - log_q) - of_rewards)).sum()
    (expected,) = torch.autograd.grad(value, policy, retain_graph=True)

    new = log_p[:, None].expand(-1, 2)  # [5, 2], the second token is masked
    mask = torch.tensor([True, False]).expand(5, 2)
    rows = replace(
        make_groups([1], [2] * 5),
        advantages=torch.full((5,), torch.nan) if alone else advantages,
        teacher_logprobs=log_q[:, None].expand(-1, 2).where(mask, torch.nan),
        response_mask=mask,
    )
    output = GRPOLoss(kl_coeff=0, importance_sampling_level=level)(
        logprobs=new,
        old_logprobs=new.detach(),
        ref_logprobs=None,
        advantages=Teacher("folder", coeff=0.7, alone=alone).advantages(rows, new),
        weights=new.detach().exp(),
        response_mask=mask,
    )
    (found,) = torch.autograd.grad(output.loss, policy)
    torch.testing.assert_close(found, expected)


def config(folder, *more):
    return load_config(CONFIG, [*tiny_overrides(CONFIG, folder), *more])


def test_every_row_is_judged_by_the_teachers_model_even_in_groups_that_teach_nothing(tmp_path):
    cfg = read_config(config(tmp_path)).replace(grpo_samples=2)
    teacher, policy = Teacher("folder"), build_policy()
    teacher.model = FrozenReference(build_policy("untied"))
    rows = replace(
        make_groups([4, 3], [5, 1, 3, 2]), advantages=torch.tensor([0.5, -0.5, 0.0, 0.0])
    )
    made = {"engine": Mock(), "optimizer": Mock(), "loss": GRPOLoss(kl_coeff=0)}
    parts = Parts(cfg=cfg, policy=policy, reference=None, teacher=None, **made)
    assert mini_batches(rows, parts)[0].trajectory.num_rows == 2
    (batch,) = mini_batches(rows, replace(parts, teacher=teacher))
    expected = response_rows(build_policy("untied"), rows, cfg.temperature)[0].float()
    found = batch.trajectory.teacher_logprobs
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_a_teacher_alone_trains_the_policy_however_a_step_is_cut(tmp_path):
    """Beside a reward that is the same for all answers."""
    (tmp_path / "my_rewards.py").write_text(SAME_REWARD)
    base, teacher = Path(config(tmp_path).model_dir), tmp_path / "teacher"
    shutil.copytree(base, teacher)
    others = {name: 1.1 * value for name, value in weights(base).items()}
    save_file(others, teacher / "model.safetensors", metadata={"format": "pt"})
    keys = [*SGD, *NO_EVALUATION, "rewards=[{_component_: my_rewards.same}]", "loss.kl_coeff=0"]
    keys += [f"objective.teacher.model_dir={teacher}", "objective.teacher.alone=true"]
    for name, more in {"whole": [], "cut": ["forward_batch_size=2"]}.items():
        run_tiny(CONFIG, tmp_path, *keys, *more, f"output_dir={tmp_path / name}")
    whole, cut = (weights(tmp_path / name / "step_000002") for name in ("whole", "cut"))
    assert distance(whole, weights(base)) > 1e-3 and distance(whole, cut) < 1e-5
    assert all(record["teacher/kl"] > 0 for record in steps_of(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("model_dir=/no/such", "objective.teacher.model_dir=/no/such: .*/no/such does not exist"),
        ("model_dir={other}", "other: lacks the policy's tokens .[0-9]+ differ, such as '.+'.; "),
        ("model_dir={short}", "longest prompt of objective.teacher, .*context of 20"),
        ("{model_dir: {other}, coeff: 0}", "objective.teacher.coeff=0: give a number above 0"),
    ],
)
def test_what_does_not_fit_the_policy_is_named(keys, said, tmp_path):
    """The other model has the tokenizer of another family; the short one a short context."""
    other, short = tmp_path / "other", tmp_path / "short"
    shutil.copytree(config(tmp_path).model_dir, short)
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 20}))
    if "{other}" in keys:
        write_tokenizer(hf_folder("llama2", other, vocab_size=400), "smollm2")
    joint = "=" if keys.startswith("{") else "."
    keys = keys.replace("{other}", str(other)).replace("{short}", str(short))
    (problem,) = Run(config(tmp_path, f"objective.teacher{joint}{keys}")).check()[0]
    assert re.search(said, problem), problem


def test_a_folder_alone_is_a_teacher(tmp_path):
    cfg = config(tmp_path)
    run = Run(config(tmp_path, f"objective.teacher={cfg.model_dir}"))
    assert run.check() == ([], [])
    teacher = run.teacher
    assert (teacher.model_dir, teacher.coeff, teacher.alone) == (cfg.model_dir, 1, False)
