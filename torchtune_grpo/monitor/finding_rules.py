"""The rules of ``findings.py``: signs of trouble in a run's newest lines, and what to change.

A false alarm is worse than silence. What success looks like too, such as a low entropy, is a sign
only below ``SOLVED``. Each threshold has its reason beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from torchtune_grpo.monitor.finding_inputs import Run, Settings, mean, rise

SOLVED = 0.8  # mean of the deciding reward: above, there is little left to learn

# Finding -> steps in a row with its signs before it begins, and a rank's groups in these steps.
BEGINS_AFTER = {
    # If a fifth of the groups taught something, 24 that do not come once in 200 times.
    **dict.fromkeys(("all_right", "all_wrong", "same_texts"), (3, 24)),
    # If it applied to a twentieth of the prompts, 100 without it come once in 170 times.
    "reward_never_applies": (3, 100),
    # One step is an accident.
    **dict.fromkeys(("truncated", "nothing_trained", "responses_shrink"), (3, 0)),
    **dict.fromkeys(("entropy_collapsed", "entropy_exploding", "kl_runaway"), (3, 0)),
    **dict.fromkeys(("sampler_trainer_gap", "reward_fails"), (3, 0)),
    # The first steps also compile and fill caches.
    **dict.fromkeys(("rewards_slow", "rollout_slow", "resampling_costly"), (5, 0)),
    # These look at many steps themselves.
    **dict.fromkeys(("only_shaping_rises", "learning_stopped"), (3, 0)),
    **dict.fromkeys(("gradient_spikes", "steps_skipped", "reward_hacking"), (1, 0)),
}
OF_EVALUATION = ("reward_hacking",)

# Name of the finding, evidence, config key, remedy.
Signs = Iterator[tuple[str, str, str, str]]


def of_step(run: Run, settings: Settings) -> Signs:
    """What the newest step, and those before it, show."""
    for rules in (_groups, _responses, _policy, _rewards, _optimizer, _progress, _seconds):
        yield from rules(run, settings)


def of_evaluation(run: Run, settings: Settings) -> Signs:
    """What is paid rises, and held-out accuracy does not, over the last four evaluations."""
    if len(run.evaluations) < 4:
        return
    before, first, third, last = run.evaluations
    change = last.reward - first.reward
    most = last.accuracy - before.accuracy + math.hypot(before.margin, last.margin)
    # Two evaluations no better, and a gain of 0.1 can be excluded.
    is_flat = 0 < before.accuracy >= max(third.accuracy, last.accuracy) and most <= 0.1
    # Samples may only catch up with what the policy's likeliest answer can do already.
    decider = next((r for r in settings.rewards if r["name"] == settings.decider), {"weight": 0})
    catches_up = decider["weight"] * (last.level - first.level) > change / 2
    catches_up &= last.level <= last.accuracy + last.margin
    # Half a spread (for a reward of 0 or 1, up to 0.25), beyond all noise of the steps.
    is_paid = change > max(3 * math.hypot(first.error, last.error), first.spread / 2)
    if is_flat and is_paid and not catches_up:
        evidence = (
            f"In 3 evaluations the reward rose from {first.reward:.3g} to {last.reward:.3g}, and "
            f"held-out accuracy went from {before.accuracy:.3g} to {last.accuracy:.3g}."
        )
        yield "reward_hacking", evidence, *_paid_less(settings)


def _paid_less(settings: Settings) -> tuple[str, str]:
    """Half of the largest weight beside the deciding reward's; without one, a stronger KL term."""
    others = [
        (abs(reward["weight"]), f"rewards.{index}.weight")
        for index, reward in enumerate(settings.rewards)
        if reward["name"] != settings.decider and reward["weight"]
    ]
    if others:
        return settings.scale(max(others)[1], 0.5)
    return settings.change("loss.kl_coeff", 2 * (settings.keys.get("loss.kl_coeff") or 0.02))


def _groups(run: Run, settings: Settings) -> Signs:
    score = f"{settings.decider} is {run.level:.2f} in the mean"
    if run.now("frac_informative_groups") == 0:
        if run.level >= 0.5:
            remedy = "Take harder prompts in dataset, or end the run."
            yield "all_right", f"No group teaches anything; {score}.", "dataset", remedy
        if run.level < 0.5:
            more = settings.scale("grpo_samples", 2)[1]
            remedy = f"Take easier prompts in dataset. If some are solved at times: {more}"
            yield "all_wrong", f"No group teaches anything; {score}.", "dataset", remedy
    same = run.now("frac_groups_same_text")
    if same >= 0.9 and run.level < SOLVED:  # the rest could hardly teach more
        evidence = f"In {same:.0%} of the groups all texts are the same; {score}."
        warmer = max(1.0, 1.5 * settings.keys["temperature"])
        yield "same_texts", evidence, *settings.change("temperature", warmer)


def _responses(run: Run, settings: Settings) -> Signs:
    cut, longest = run.now("completions/clipped_ratio"), run.now("completions/max_length")
    if cut >= 0.9:  # an answer that is cut off is none
        is_late = longest < settings.keys["max_generated_tokens"]
        key = "rollout.deadline" if is_late else "max_generated_tokens"
        yield "truncated", f"{key} cut off {cut:.0%} of the responses.", *settings.scale(key, 2)
    kept = "sampling/kept_mass" in run.steps[-1]  # a mean over all tokens that are trained on
    if not kept and "completions/mean_length" in run.steps[-1]:
        if settings.keys["objective.mask_truncated_completions"]:
            change = settings.change("objective.mask_truncated_completions", False)
        else:
            change = settings.scale("max_generated_tokens", 2)
        yield "nothing_trained", "No token was trained on.", *change
    length, first = run.now("completions/mean_length"), run.first("completions/mean_length")
    # A tenth; shorter responses that are right more often are none of it.
    if length < first / 10 and run.level <= run.first(run.decider):
        evidence = f"The mean response shrank from {first:.3g} to {length:.3g} tokens."
        least = settings.change("sampling.min_new_tokens", math.ceil(first / 10))
        yield "responses_shrink", evidence, *least


def _policy(run: Run, settings: Settings) -> Signs:
    entropy, first = run.now("entropy"), run.first("entropy")
    evidence = f"The entropy of a token went from {first:.3g} to {entropy:.3g} nats."
    # Models begin with 0.1 to 1; at 0.05 the likeliest token is taken 99 times of 100.
    if entropy < min(0.05, 0.1 * first) and run.level < SOLVED:
        more = 2 * (settings.keys.get("loss.entropy_coeff") or 0.0005)
        yield "entropy_collapsed", evidence, *settings.change("loss.entropy_coeff", more)
    if entropy > max(2 * first, first + 1):  # a nat: as from e times as many tokens
        yield "entropy_exploding", evidence, *settings.scale("optimizer.lr", 0.5)
    kl = run.now("kl")
    if kl > 1:  # e times as likely as before, each token; usual is below 0.1
        evidence = f"The KL to the reference is {kl:.3g} nats a token."
        yield "kl_runaway", evidence, *settings.scale("loss.kl_coeff", 2)
    gap = run.now("sampling/sampling_logp_difference/mean")
    if gap > 0.1:  # rounding in bf16 makes 0.01 to 0.03
        if settings.keys.get("model.lora_dropout"):  # acts in the trainer alone
            change = settings.change("model.lora_dropout", 0.0)
        elif settings.keys["objective.sampling_correction"] is None:
            change = settings.change("objective.sampling_correction", "token_truncate")
        else:
            change = settings.change("dtype", "fp32")
        yield "sampler_trainer_gap", f"Their log-probs of a token differ by {gap:.3g}.", *change


def _rewards(run: Run, settings: Settings) -> Signs:
    change, error = rise(run.last(run.decider, 20))
    decider_rises = not change <= error or run.level >= SOLVED
    for index, reward in enumerate(settings.rewards):
        name, weight, key = reward["name"], reward["weight"], f"rewards.{index}"
        failed, none = (run.now(f"rewards/{name}/{what}") for what in ("errors", "none"))
        if failed >= 0.01:  # in each of some steps: a mistake in the code, or one that is provoked
            remedy = "Correct what its error in the log says, or return None there."
            yield "reward_fails", f"{name} failed on {failed:.0%} of the rows.", key, remedy
        if none == 1:
            remedy = "Correct the column or the condition that it looks for, or leave it out."
            yield "reward_never_applies", f"{name} returned None for all rows.", key, remedy
        values = run.last(f"rewards/{name}/mean", 20)
        change, error = rise(values)
        spread = mean(run.last(f"rewards/{name}/std", 20))[0]
        # As for reward_hacking, without evaluations: half a spread, beyond all noise.
        is_paid = math.copysign(change, change * weight) > max(3 * error, spread / 2)
        if len(values) == 20 and is_paid and weight and not decider_rises:
            evidence = (
                f"In 20 steps {name} changed by {change:+.3g}; {settings.decider} did not rise."
            )
            yield "only_shaping_rises", evidence, *settings.scale(f"{key}.weight", 0.5)


def _optimizer(run: Run, settings: Settings) -> Signs:
    norms = run.last("grad_norm", 40)
    before = [norm for norm in norms[:-10] if norm > 0]
    usual = median(before) if len(before) >= 10 else math.inf
    spikes = [norm for norm in norms[-10:] if norm > 10 * usual]  # other prompts make 3 times
    if len(spikes) >= 3:
        evidence = f"{len(spikes)} gradient norms of 10 are beyond 10 times the usual {usual:.3g}."
        if settings.keys["clip_grad_norm"] is None:
            change = settings.change("clip_grad_norm", 2 * usual)
        else:
            change = settings.scale("optimizer.lr", 0.5)
        yield "gradient_spikes", evidence, *change
    counts = [0.0, *run.last("nonfinite_steps", 100)][-21:]
    if counts[-1] - counts[0] >= 2:  # one is an accident; three in a row end the run
        evidence = f"{counts[-1] - counts[0]:.0f} of 20 steps were not finite and skipped."
        yield "steps_skipped", evidence, *settings.scale("optimizer.lr", 0.5)


def _progress(run: Run, settings: Settings) -> Signs:
    rewards = run.last("reward", 100)  # fewer do not tell a slow rise from none
    if len(rewards) < 100 or not mean(run.last(run.decider, 100))[0] < SOLVED:
        return
    change, error = rise(rewards)
    # No rise, and one of a tenth of the spread would have been seen.
    is_flat = change <= 0 and change + 2 * error < 0.1 * mean(run.last("reward_std", 100))[0]
    # The end of a schedule is meant to be flat.
    rate, peak = run.now("learning_rate"), settings.keys.get("optimizer.lr")
    is_over = isinstance(peak, float) and rate < 0.1 * peak
    held_out = [evaluation.accuracy for evaluation in run.evaluations]
    if is_flat and not is_over and held_out[-1:] <= held_out[:1]:
        evidence = f"The reward has stayed at {mean(rewards)[0]:.3g} for 100 steps."
        yield "learning_stopped", evidence, *settings.scale("optimizer.lr", 2)


def _seconds(run: Run, settings: Settings) -> Signs:
    step = run.now("step_time") or math.nan
    share = run.now("time/reward") / step
    if share > 0.5:  # an accelerator that waits for rewards most of the time
        seconds = [run.now(f"time/rewards/{reward['name']}") for reward in settings.rewards]
        index = max(range(len(seconds)), key=seconds.__getitem__)
        evidence = f"{settings.rewards[index]['name']}: rewards take {share:.0%} of a step."
        if "workers" in settings.rewards[index]:
            change = settings.scale(f"rewards.{index}.workers", 2)
        else:
            change = settings.change(f"rewards.{index}.isolation", "process")
        yield "rewards_slow", evidence, *change
    share = run.now("time/dropped") / step
    if share > 0.5:  # what is thrown away costs more than all that is trained on
        kept = run.now("dynamic_sampling/kept")
        evidence = f"Dynamic sampling keeps {kept:.0%} of the groups; the others take {share:.0%}."
        key = "dynamic_sampling.max_resamples"
        yield "resampling_costly", evidence, *settings.change(key, settings.keys[key] // 2)
    share = run.now("time/rollout") / step
    # Half to four fifths is usual, of a whole update; more rows cost a decoding step little.
    if share > 0.9 and run.now("frac_informative_groups") >= 0.5:
        evidence = f"The rollout takes {share:.0%} of a step."
        rows = settings.keys["batch_size"] * settings.keys["grpo_samples"]
        if (settings.keys["rollout.max_rows"] or rows) < rows:
            yield "rollout_slow", evidence, *settings.change("rollout.max_rows", rows)
        else:
            yield "rollout_slow", evidence, *settings.scale("batch_size", 2)
