"""Every number that a step logs, by hand."""

import math
import re
import statistics
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from steps import make_scores, make_trajectory

from torchtune_grpo import run
from torchtune_grpo.config.command_line import recipes_folder
from torchtune_grpo.loss import GRPOLoss, LossOutput
from torchtune_grpo.monitor import metrics as metrics_module
from torchtune_grpo.monitor.metrics import StepMetrics

NAN = math.nan


def of_rollout(total=(1.0, 3.0, 5.0, 5.0), **changes):
    """What a rollout logs whose rows have these totals."""
    metrics, scores = StepMetrics(), replace(make_scores(), total=torch.tensor(total))
    metrics.add_rollout(replace(make_trajectory(), **changes), scores, group_size=2)
    return metrics.compute()


def test_what_a_rollout_logs():
    expected = {
        "reward": 3.5,
        "reward_std": statistics.stdev([1, 3, 5, 5]),
        "reward_std_in_group": statistics.stdev([1, 3]) / 2,  # and 0 of the second group
        "frac_reward_zero_std": 0.5,
        "frac_informative_groups": 0.5,
        "frac_groups_same_text": 0.0,
        "rewards/a/mean": 7 / 3,
        "rewards/a/std": statistics.stdev([1, 2, 4]),
        "rewards/a/errors": 0.25,
        "rewards/a/none": 0.0,
        "rewards/b/mean": 0.5,
        "rewards/b/std": 0.0,
        "rewards/b/errors": 0.0,
        "rewards/b/none": 0.25,
        "rewards/a/depth": 4.5,
        "time/rewards/a": 0.25,
        "time/rewards/b": 0.5,
        "completions/mean_length": 2.0,
        "completions/min_length": 1.0,
        "completions/max_length": 3.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 2.0,
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 3.0,
        "num_tokens": 12.0,
        # Four first tokens of which all mass was kept, three second ones of which half was: what
        # is not trained on does not count.
        "sampling/kept_mass": (4 * 1 + 3 * 0.5) / 7,
    }
    assert of_rollout() == pytest.approx(expected)


def test_a_failed_reward_makes_no_group_informative():
    """1 and failed: both count as 1, and nothing is learnt."""
    values = of_rollout(total=(1.0, 1.0, 5.0, 5.0), advantages=torch.zeros(4))
    assert (values["frac_informative_groups"], values["frac_reward_zero_std"]) == (0, 1)
    assert values["reward_std_in_group"] == 0


def test_a_group_whose_texts_are_all_the_same():
    """The second of two; that another group has its text says nothing."""
    assert of_rollout(completions=["a", "b", "a", "a"])["frac_groups_same_text"] == 0.5


def test_groups_are_informative_by_their_advantages():
    """Normalized one by one, two rewards may cancel in the total and still teach."""
    assert of_rollout(total=(1.0, 1.0, 5.0, 5.0))["frac_informative_groups"] == 0.5


def test_what_an_update_logs():
    """Two micro-batches of three and one trained tokens: means are over tokens."""
    mask = torch.tensor([[True, True], [True, False]])
    first = LossOutput(torch.tensor(0.3), {"kl": torch.tensor(6.0), "own": torch.tensor(1)})
    second = LossOutput(torch.tensor(0.3), {"kl": torch.tensor(2.0), "own": torch.tensor(0)})
    metrics = StepMetrics()
    metrics.add_update(first, entropy=torch.tensor([[1.0, 2.0], [3.0, NAN]]), response_mask=mask)
    metrics.add_update(second, entropy=torch.tensor([[6.0]]), response_mask=mask[:1, :1])
    assert metrics.compute() == {"kl": 2.0, "own": 0.25, "entropy": 3.0}


def test_the_gap_between_sampler_and_trainer():
    metrics, trajectory = StepMetrics(), make_trajectory()
    logprobs = torch.full((4, 3), -1.5)
    logprobs[1, 1], logprobs[2, 2] = -3.0, 99.0  # the latter is not trained on
    metrics.add_sampling_gap(trajectory, logprobs)
    expected = {
        "sampling/sampling_logp_difference/mean": (6 * 0.5 + 2.0) / 7,
        "sampling/sampling_logp_difference/max": 2.0,
    }
    assert metrics.compute() == pytest.approx(expected)
    nothing = replace(trajectory, response_mask=torch.zeros(4, 3, dtype=torch.bool))
    metrics = StepMetrics()
    metrics.add_sampling_gap(nothing, logprobs)
    assert metrics.compute() == {}


def test_an_update_on_no_rows_adds_nothing():
    nothing = make_trajectory().select(torch.zeros(4, dtype=torch.bool))
    metrics, none = StepMetrics(), torch.empty(0, 3)
    output = LossOutput(torch.tensor(0.0), {"kl": torch.tensor(0.0)})
    metrics.add_update(output, entropy=none, response_mask=nothing.response_mask)
    metrics.add_sampling_gap(nothing, none)
    assert metrics.compute() == {}


def test_losses_of_a_step_are_averaged_and_maxima_kept():
    """Three optimizer steps on one rank; a loss that is not finite is not hidden."""
    metrics = StepMetrics()
    for loss, norm in ((1.0, 4.0), (2.0, 9.0), (6.0, 1.0)):
        metrics.add_sum("loss", torch.tensor(loss), 1.0)
        metrics.add_max("grad_norm", torch.tensor(norm))
    assert metrics.compute() == {"loss": 3.0, "grad_norm": 9.0}
    metrics.add_sum("loss", torch.tensor(NAN), 1.0)
    assert math.isnan(metrics.compute()["loss"])


def test_ranks_add_up_before_they_are_divided(monkeypatch):
    """Rank 0 has one value and rank 1 three; the loss is the sum of the ranks' shares."""
    parts = []
    for values, share, seconds in (([1.0], 0.25, 2.0), ([4.0, 5.0, 6.0], 0.75, 3.0)):
        metrics = StepMetrics()
        metrics.add_values("rewards/a/mean", torch.tensor(values))
        metrics.add_sum("loss", torch.tensor(share), 1 / 2)
        metrics.add_max("learning_rate", 0.1)
        metrics.add_min("completions/min_length", seconds)
        metrics.add_sum("num_tokens", torch.tensor(7), 0)
        metrics.add_max("time/rollout", seconds)
        metrics.add_max("step_time", 10.0)
        parts.append(metrics)
    sent = []
    monkeypatch.setattr(
        metrics_module, "gather_over_ranks", lambda value: sent.append(value) or list(sent)
    )
    parts[0].add_values("completions/mean_length", torch.tensor([30.0]))
    parts[0].compute()
    result = parts[1].compute()
    assert result == pytest.approx(
        {
            "rewards/a/mean": 4.0,
            "rewards/a/std": statistics.stdev([1, 4, 5, 6]),
            "loss": 1.0,
            "completions/mean_length": 30.0,
            "learning_rate": 0.1,
            "completions/min_length": 2.0,
            "num_tokens": 14.0,
            "time/rollout": 3.0,
            "step_time": 10.0,
            "rollout/tokens_per_second": 10.0,
            "tokens_per_second": 3.0,
        }
    )


def test_timers_add_up():
    metrics = StepMetrics()
    for _ in range(2):
        with metrics.timer("time/reward"):
            time.sleep(0.02)
    assert 0.04 <= metrics.compute()["time/reward"] < 1


# What TRL logs of what does not exist here: tools, a mixture's routers, other losses, a schedule.
NOT_OURS = """
tools/call_frequency tools/failure_frequency policy_loss aux_loss entropy_coef vespo/phi_seq_mean
clip_ratio/low_min clip_ratio/high_max sampling/importance_sampling_ratio/min epoch
sampling/importance_sampling_ratio/mean sampling/importance_sampling_ratio/max
num_input_tokens_seen
""".split()
# What TRL has no name for.
NOT_TRLS = """
reward_std_in_group frac_informative_groups frac_groups_same_text sampling/kept_mass nonfinite_steps
tokens_per_second rollout/tokens_per_second time/rollout time/reward time/logprobs time/update
rewards/a/errors rewards/a/none rewards/b/errors rewards/b/none rewards/a/depth time/rewards/a
time/rewards/b
""".split()


def trl_names() -> set[str]:
    """From the source of TRL's trainer and of the one that it extends."""
    found = []
    for package, file, pattern in (
        ("trl", "trainer/grpo_trainer.py", r'_metrics\[[^]]+\]\[f?"([^"]+)"\]'),
        ("transformers", "trainer.py", r'logs\["([^"]+)"\]'),
    ):
        source = Path(find_spec(package).origin).parent / file
        found += re.findall(pattern, source.read_text())
    names = {name.format(reward_func_name=reward) for name in found for reward in "ab"}
    assert "rewards/a/mean" in names and len(names) > 30
    return names


def test_names_are_trls_where_trl_has_one():
    """A name that is neither TRL's nor listed above is a mistake, and so is one that is missing."""
    metrics, trajectory = StepMetrics(), make_trajectory()
    metrics.add_rollout(trajectory, make_scores(), group_size=2)
    metrics.add_sampling_gap(trajectory, trajectory.sampler_logprobs)
    inputs = {name: trajectory.sampler_logprobs for name in ("logprobs", "ref_logprobs", "entropy")}
    mask = trajectory.response_mask
    inputs |= {"old_logprobs": None, "weights": mask.float(), "response_mask": mask}
    for surrogate in ("clipped", "cispo"):
        output = GRPOLoss(surrogate=surrogate)(advantages=trajectory.advantages, **inputs)
        metrics.add_update(output, entropy=inputs["entropy"], response_mask=mask)
    files = (recipes_folder() / "grpo_full_finetune.py", Path(run.__file__))
    source = "".join(file.read_text() for file in files)
    for name in re.findall(r'(?:metrics|step)\.(?:add_\w+|timer)\(\s*"([^"]+)"', source):
        metrics.add_max(name, 1.0)
    # What PolicyOptimizer.step returns.
    metrics.add_numbers(dict.fromkeys(("grad_norm", "learning_rate", "nonfinite_steps"), 1.0))
    ours, trls = set(metrics.compute()), trl_names()
    assert ours - trls == set(NOT_TRLS)
    assert trls - ours == set(NOT_OURS)
