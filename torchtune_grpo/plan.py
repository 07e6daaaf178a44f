"""Forecasts, before a run's first step, whether it learns, how long it takes and whether it fits.

    torchtune-grpo plan --config smollm2_135M_grpo optimizer.lr=1e-3

A plan sets up the run of a config in a folder of its own below ``output_dir``, samples the groups
of its first steps, trains on the last of them once, and throws that run away. Only ``plan.json`` is
left; the real run is the same as without a plan. The exit code is 0 if the run learns, 3 if that is
doubtful, and 4 if it will not learn as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from torchtune_grpo.cli.commands import add_run, parse, run_config
from torchtune_grpo.config.text import aligned, to_json, write_text
from torchtune_grpo.evaluation import thresholds
from torchtune_grpo.evaluation.statistics import Score, bootstrap_interval
from torchtune_grpo.machine import lock
from torchtune_grpo.machine.device import free_bytes, only_warnings, seed_step
from torchtune_grpo.machine.parallel import on_first_rank, sum_over_ranks, world_size
from torchtune_grpo.machine.progress import Meter
from torchtune_grpo.monitor import findings
from torchtune_grpo.monitor.findings import History, Sign
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.recipes.grpo_full_finetune import GRPOFullFinetuneRecipe
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.run import Run
from torchtune_grpo.sandbox.syscalls import memory_of, processes_of
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.trajectory import Trajectory

VERDICTS = {"learns": 0, "doubtful": 3, "will not learn": 4}  # exit codes; those of errors differ
_ROUNDS, _SECONDS = 4, 45  # limits on sampling; the first one reached ends it
_TIME_FACTOR = 1.6  # by which a step's time may differ, up or down


@dataclass
class Plan:
    """Measurements of a plan, and its verdict; scores are over prompts."""

    prompts: int
    samples: int  # for each prompt
    max_generated_tokens: int
    max_response_tokens: int  # with what an environment answers
    measure: str  # what the next is the mean of: accuracy, or a reward not known to decide
    pass_rate: Score
    informative: Score
    cut_off: Score
    rewards: dict[str, float]  # each reward's mean; NaN if it never applied
    spread: dict[str, float]  # and its share of the variance of their sum within groups
    moved: float | None  # by a step: the KL in nats a token; None = there was nothing to train on
    time: dict[str, float]  # seconds
    memory: dict[str, int]  # bytes
    seconds: float = 0.0  # that the plan took
    verdict: str = "learns"
    reasons: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)  # overrides that would change the verdict

    def add(self, verdict: str, sign: Sign) -> None:
        """Note why the run does not simply learn."""
        self.verdict = max(self.verdict, verdict, key=VERDICTS.__getitem__)
        self.reasons.append(f"{sign.evidence} {sign.remedy}")
        self.changes += [] if sign.override is None else [sign.override]


def make_plan(given: DictConfig, objects: Mapping[str, object] | None = None) -> Plan:
    """Plan a config's run, and write ``output_dir/plan.json``; ``objects`` are those of ``Run``."""
    start = time.perf_counter()
    folder = Path(os.path.expanduser(given.output_dir))
    scratch = folder / ".plan"
    cfg = given.copy()
    OmegaConf.set_readonly(cfg, False)
    logger = "torchtune.training.metric_logging.DiskLogger"
    cfg.update(
        output_dir=str(scratch),
        metric_logger={"_component_": logger, "log_dir": "${output_dir}"},
        log_groups=0,
        lr_scheduler=None,  # its first steps may be smaller than those to come
        resume_from_checkpoint=False,
        profiler=None,
    )
    recipe = GRPOFullFinetuneRecipe(cfg, Run(cfg, objects=objects))
    try:
        with Meter("Plan", total=_ROUNDS + 1) as meter:
            meter.show("reads the data and the model")
            with only_warnings():
                recipe.setup(cfg)
            plan = _plan(recipe, meter)
    finally:
        recipe.run.close()
        if scratch.resolve() in lock.held():  # not another plan's
            shutil.rmtree(scratch, ignore_errors=True)
            lock.release(scratch)
    plan.seconds = time.perf_counter() - start
    text = json.dumps(to_json(asdict(plan)), indent=1)
    on_first_rank(write_text, folder / "plan.json", text)
    return on_first_rank(lambda: plan)  # a script may do what it says


def _goes_on(rounds: int, *, start: float) -> bool:
    """Whether another round is sampled, on all ranks: by the first one's clock."""
    has_time = on_first_rank(lambda: time.perf_counter() - start < _SECONDS)
    return not rounds or (rounds < _ROUNDS and has_time)


def _plan(recipe: GRPOFullFinetuneRecipe, meter: Meter) -> Plan:
    run, cfg, size = recipe.run, recipe.cfg, recipe.cfg.grpo_samples
    groups, seen = run.recorder.groups, []
    times: list[dict[str, float]] = []
    run.recorder.progress = lambda now: meter.show(f"rollout {now}")
    start = time.perf_counter()
    while _goes_on(len(times), start=start):
        recipe.steps.done = len(times)
        seed_step(cfg.seed, recipe.steps.done)
        step = StepMetrics()
        with step.timer("step_time"):
            last = recipe.rollout(step)
        times.append(step.compute())
        meter.show(done=len(times))
        seen += groups.rollouts
        _, prompts = groups.take(recipe.steps.done)
        run.sampler.learn(prompts["prompt_index"], prompts["pass_rate"])
    rows = Trajectory.join([rows for rows, _ in seen])
    scores = RewardScores.join([scores for _, scores in seen])
    metrics, decider = StepMetrics(), run.rewards.decider.name
    metrics.add_rollout(rows, scores, group_size=size)
    history = History(cfg, run.rewards.ranges, decider)
    event: Any = {"kind": "step", "step": 0, "wrong": scores.wrong, **metrics.compute()}
    history.add(event)
    meter.show("trains on the last step", done=_ROUNDS)
    moved, update = _train_once(recipe, last)
    assert rows.advantages is not None
    plan = Plan(
        prompts=rows.num_rows // size,
        samples=size,
        max_generated_tokens=cfg.max_generated_tokens,
        max_response_tokens=cfg.max_response_tokens,
        measure=run.rewards.decider.measure,
        pass_rate=_score(scores.of(decider).view(-1, size).nanmean(dim=1).clamp(0, 1)),
        informative=_score((rows.advantages.view(-1, size) != 0).any(dim=1)),
        cut_off=_score(rows.truncated.double().view(-1, size).mean(dim=1)),
        rewards={name: history.now(f"rewards/{name}/mean") for name in scores.names},
        spread=_shares_of_spread(scores, group_size=size),
        moved=moved,
        time=_seconds(recipe, times, update, rows.sampled_lengths),
        memory=_memory(run),
    )
    judge(plan, history)
    return plan


# --- Measuring ------------------------------------------------------------------------------------


def _score(values: Tensor) -> Score:
    """Return the mean of values by group [B], without NaN, and its interval."""
    values = values[~values.isnan()].double().cpu()
    if not len(values):
        return Score(math.nan, 0.0, 1.0)
    return Score(float(values.mean()), *bootstrap_interval(values))


def _shares_of_spread(scores: RewardScores, *, group_size: int) -> dict[str, float]:
    """Return each reward's share of the variance of their weighted sum within groups."""
    weighted = scores.scores.double() * scores.weights  # [N, R]
    groups = weighted.unflatten(0, (-1, group_size))  # [B, G, R]
    # A score that is None or failed is no spread.
    parts = (groups - groups.nanmean(dim=1, keepdim=True)).nan_to_num(0.0).flatten(0, 1)  # [N, R]
    total = parts.sum(dim=1)  # [N]
    shares = total @ parts / max(float(total @ total), 1e-12)  # [R]
    return dict(zip(scores.names, shares.tolist(), strict=True))


def _train_once(recipe: GRPOFullFinetuneRecipe, rows: Trajectory) -> tuple[float | None, float]:
    """Train on a step's rows; return how far that moves the policy, and the seconds it took."""
    cfg, step = recipe.cfg, StepMetrics()
    with step.timer("step_time"):
        batches = recipe.mini_batches(rows, step)
        for batch in batches * cfg.ppo_epochs:
            recipe.update(batch, step)
    seconds = step.compute()["step_time"]
    counts = [sum_over_ranks(int(each.trajectory.response_mask.sum())) for each in batches]
    batch = batches[counts.index(max(counts))]
    recipe.model.eval()
    new = trajectory_logprobs(recipe.model, batch.micro_batches, temperature=cfg.temperature)
    assert batch.old_logprobs is not None  # update() has set them
    change = (new - batch.old_logprobs).double()[batch.trajectory.response_mask]
    if not len(change):  # no token was trained on
        return None, seconds
    # The KL in nats a token, capped by the mean |change|, as a few ratios may be huge.
    return float(min((change.exp() - 1 - change).mean(), change.abs().mean())), seconds


def _seconds(
    recipe: GRPOFullFinetuneRecipe,
    times: Sequence[Mapping[str, float]],
    update: float,
    lengths: Tensor,
) -> dict[str, float]:
    """Forecast the seconds of a step, of an evaluation and of the run from this rank's rows [N]."""
    cfg, later = recipe.cfg, times[1:] or times  # the first one also warms up
    rollout, reward = (fmean(e[f"time/{part}"] for e in later) for part in ("rollout", "reward"))
    found = {"rollout": rollout, "reward": reward, "update": update, "step": 0.0}
    found["step"] = sum(found.values())
    rows, at_once = len(lengths) / len(times), cfg.batch_size * cfg.grpo_samples
    at_once = min(at_once, cfg.rollout.max_rows or at_once)
    decoding = partial(_decoding_steps, lengths, at_once=at_once)
    greedy = -(-len(recipe.run.eval_dataset or ()) // world_size())
    evaluation = 0.0
    for answers in (greedy, greedy * cfg.evaluation.samples):
        evaluation += rollout * decoding(answers) / max(decoding(rows), 1)
        evaluation += reward * answers / rows
    evaluations = 1 + -(-cfg.num_steps // (cfg.evaluation.every_n_steps or cfg.num_steps))
    total = cfg.num_steps * found["step"] + evaluations * evaluation
    return found | {"evaluation": evaluation, "run": total}


def _decoding_steps(lengths: Tensor, count: float, *, at_once: int) -> float:
    """Return the decoding steps of ``count`` responses: few rows take as long as their longest."""
    ranks = torch.linspace(0, 1, len(lengths) + 1, dtype=torch.float64)
    chances = (ranks**count).diff()  # [N] of each length, in order, to be the longest of ``count``
    longest = float(lengths.cpu().double().sort().values @ chances)
    return max(longest, count * float(lengths.double().mean()) / at_once)


def _memory(run: Run) -> dict[str, int]:
    if run.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(run.device)
        return {"peak": peak, "total": torch.cuda.mem_get_info(run.device)[1]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak += sum(map(memory_of, processes_of(os.getpid())))  # of rewards, say
    return {"peak": peak, "total": peak + free_bytes(run.device)}


# --- The verdict ----------------------------------------------------------------------------------


def judge(plan: Plan, run: History) -> None:
    """Say whether a run learns: by the rules of the findings, on what the plan has sampled."""
    groups = findings.groups(run, few=thresholds.FEW_TEACH)
    rules = (findings.rewards(run), findings.responses(run), groups)
    signs = [*chain(*rules)]  # several rewards may have the same one
    known = findings.by_name(signs)
    for sign in signs:
        if sign.name in known:
            plan.add(_verdict(sign, plan, run), sign)
    for index, (name, share) in enumerate(plan.spread.items()):
        if share > 0.5 and name != run.decider:
            reason = f"{share:.0%} of the rewards' spread in groups is that of {name}."
            quieter = run.weigh(index, 0.1)
            plan.add("doubtful", Sign("spread", reason, *quieter))
    moved, steps, far = plan.moved, run.config("num_steps"), thresholds.FAR
    if moved is not None and moved > far:
        is_mild = moved < thresholds.TOO_FAR
        verdict, factor = ("doubtful", 1 / 3) if is_mild else ("will not learn", 1 / 30)
        reason = f"One step moves the policy by {moved:.2g} nats a token, where {far} is much."
        plan.add(verdict, Sign("moved", reason, *run.scale("optimizer.lr", factor)))
    elif moved is not None and math.sqrt(moved) * steps < thresholds.NEAR:
        reason = f"{steps} steps hardly move the policy: the first by {moved:.1g} nats a token."
        faster = run.change("optimizer.lr", max(10 * (run.config("optimizer.lr") or 0), 1e-5))
        plan.add("will not learn", Sign("moved", reason, *faster))
    if plan.memory["peak"] > 0.9 * plan.memory["total"]:
        rows = run.config("forward_batch_size") or run.config("batch_size") * plan.samples
        fewer = run.change("forward_batch_size", max(1, rows // 2))
        plan.add("doubtful", Sign("memory", "Memory is nearly full.", *fewer))


def _verdict(sign: Sign, plan: Plan, run: History) -> str:
    """Say what a sign makes of a run."""
    if sign.name.startswith("reward_"):
        keys = zip(run.rewards, run.keys, strict=True)
        names = [reward["name"] for reward, key in keys if key == sign.key]
        if sign.name == "reward_fails":  # on more than max_reward_failure_share: an error
            return "doubtful"
        if run.decider in names:
            return "will not learn"
        is_none = any(run.now(f"rewards/{name}/none") == 1 for name in names)
        return "doubtful" if is_none else "learns"
    # Where some are right, groups that seldom teach may still be enough.
    some_right = thresholds.HARDLY_ANY_RIGHT < plan.pass_rate.mean < thresholds.NEARLY_ALL_RIGHT
    is_hopeless = plan.informative.mean < thresholds.HARDLY_ANY_TEACH and not some_right
    return "will not learn" if is_hopeless else "doubtful"


def lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan, which fit on one screen."""
    yield (
        f"From {plan.prompts} prompts with {plan.samples} samples each, and one step of training, "
        f"in {plan.seconds:.0f} s. [95 % interval over prompts]"
    )
    yield from aligned([*_table(plan)])
    yield f"Verdict: {plan.verdict}."
    yield from (f"- {reason}" for reason in plan.reasons)
    if plan.changes:
        yield f"Try: {shlex.join(plan.changes)}"


def _table(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what was measured, each line behind its title."""
    title = "right" if plan.measure == "accuracy" else f"mean {plan.measure}"
    yield title, str(plan.pass_rate)
    yield "groups teaching", f"{plan.informative} with {plan.samples} samples"
    sampled, most = plan.max_generated_tokens, plan.max_response_tokens
    limits = f"{most} tokens" if most == sampled else f"{sampled} sampled or {most} tokens"
    yield "cut off", f"{plan.cut_off} at {limits}"
    for name, mean in plan.rewards.items():
        yield name, f"{mean:.3f}, {plan.spread[name]:.0%} of the spread in groups"
    if plan.moved is not None:
        yield "one step", f"moves the policy by {plan.moved:.2g} nats a token"
    seconds, minutes = plan.time, plan.time["run"] / 60
    parts = ", ".join(f"{name} {seconds[name]:.3g}" for name in ("rollout", "reward", "update"))
    yield "time", f"{seconds['step']:.3g} s a step ({parts})"
    yield "", f"{seconds['evaluation']:.3g} s an evaluation"
    low, high = minutes / _TIME_FACTOR, minutes * _TIME_FACTOR
    yield "  of the run", f"{minutes:.3g} min [{low:.2g}, {high:.2g}]"
    yield "memory", f"{plan.memory['peak'] / 1e9:.1f} of {plan.memory['total'] / 1e9:.1f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Predicts whether a run will learn, its time and its memory."
    )
    add_run(parser)
    plan = make_plan(run_config(parse(parser)))
    print("\n".join(lines(plan)))
    sys.exit(VERDICTS[plan.verdict])
