"""Each finding begins at its threshold and not below, once, and ends once."""

import json
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.monitor.findings import BEGINS_AFTER, Watch

HEALTHY = {
    "reward": 0.5,
    "reward_std": 0.5,
    "frac_informative_groups": 0.5,
    "frac_groups_same_text": 0.0,
    "rewards/correctness/mean": 0.4,
    "rewards/correctness/std": 0.5,
    "rewards/correctness/errors": 0.0,
    "rewards/correctness/none": 0.0,
    "rewards/format/mean": 0.9,
    "rewards/format/std": 0.3,
    "rewards/format/errors": 0.0,
    "rewards/format/none": 0.0,
    "completions/mean_length": 40.0,
    "completions/max_length": 48.0,
    "completions/clipped_ratio": 0.2,
    "sampling/sampling_logp_difference/mean": 0.02,
    "sampling/kept_mass": 1.0,
    "kl": 0.05,
    "sampling/entropy": 0.8,
    "grad_norm": 0.2,
    "learning_rate": 5e-4,
    "nonfinite_steps": 0.0,
    "step_time": 1.0,
    "time/reward": 0.1,
    "time/rewards/correctness": 0.02,
    "time/rewards/format": 0.08,
}
LEVEL, FORMAT = "rewards/correctness/mean", "rewards/format/mean"


@cache
def config(*changes: str) -> GRPOConfig:
    """The demo's: 16 groups a step."""
    return read_config(load_config("tiny_arithmetic_grpo", list(changes)))


def events(records: Iterable[dict]) -> list[dict]:
    """Events with these metrics, numbered as they come."""
    kinds = ("evaluation" if "eval/accuracy" in record else "step" for record in records)
    return [
        {**record, "kind": kind, "step": number}
        for number, (record, kind) in enumerate(zip(records, kinds), 1)
    ]


def watch_of(*changes: str) -> Watch:
    cfg = config(*changes)
    names = ["correctness", "format"][: len(cfg.rewards)]
    return Watch(cfg, dict.fromkeys(names), decider="correctness")


def findings(watch: Watch, events: list[dict]) -> list[dict]:
    return [found for event in events for found in watch.add(event)]


def run(records: list[dict], *changes: str) -> list[dict]:
    """Return the findings that begin and end in a run with these metrics."""
    return findings(watch_of(*changes), events(records))


# Finding -> a metric, its value at the threshold, the same just below (None: missing), steps until
# it begins, config, the key to change, and to what.
LENGTH, CUT = "completions/mean_length", "completions/clipped_ratio"
ENTROPY = "sampling/entropy"
GAP = "sampling/sampling_logp_difference/mean"
TRUNCATED = "objective.mask_truncated_completions"
CASES = {
    "all_right": ("frac_informative_groups", 0.0, 0.06, 3, "",
        "dataset", "Take harder prompts in dataset, or end the run."),
    "all_wrong": ("frac_informative_groups", 0.0, 0.06, 6, "batch_size=4",
        "dataset", "Take easier prompts in dataset. If some are solved at times: Set grpo_samples: "
        "16 -> 32."),
    "same_texts": ("frac_groups_same_text", 0.9, 0.89, 3, "temperature=0.8",
        "temperature", "0.8 -> 1.2"),
    "truncated": (CUT, 0.5, 0.49, 3, "", TRUNCATED, "False -> True"),
    "nothing_trained": ("sampling/kept_mass", None, 0.001, 3, f"{TRUNCATED}=true",
        TRUNCATED, "True -> False"),
    "responses_shrink": (LENGTH, 3.9, 4.0, 3, "", "dataset.system_prompt",
        "Ask for the steps to an answer, or show some: `torchtune-grpo prompts`."),
    "entropy_collapsed": (ENTROPY, 0.049, 0.05, 3, "", "loss.entropy_coeff", "0.001"),
    "entropy_exploding": (ENTROPY, 1.81, 1.8, 3, "", "optimizer.lr", "0.0005 -> 0.00025"),
    "kl_runaway": ("kl", 1.01, 1.0, 3, "loss.kl_coeff=0.04", "loss.kl_coeff", "0.04 -> 0.08"),
    "sampler_trainer_gap": (GAP, 0.11, 0.1, 3, "",
        "objective.sampling_correction", "token_truncate"),
    "learning_rate_zero": ("learning_rate", 0.0, 1e-9, 3, "", "lr_scheduler",
        "Let lr_scheduler end later, or above 0."),
    "reward_fails": ("rewards/format/errors", 0.01, 0.009, 3, "",
        "rewards.1", "Correct what its error in the log says, or return None there."),
}  # fmt: skip


def step_with(metric: str, value: float | None, **more: float) -> dict:
    """A step's metrics, healthy but for some."""
    changed = HEALTHY | more | {metric: value}
    return {k: v for k, v in changed.items() if v is not None}


@pytest.mark.parametrize("name", CASES)
def test_a_finding_begins_at_its_threshold_once_and_ends_once(name):
    """After so many steps; one good step neither ends it nor lets it begin again."""
    metric, value, below, steps, changes, key, remedy = CASES[name]
    more = {"all_right": {LEVEL: 0.5}, "truncated": {LEVEL: 0.2}}.get(name, {})
    good, bad = [HEALTHY] * 5, [step_with(metric, value, **more)] * steps
    config = changes.split()
    assert run([*good, *bad[1:], HEALTHY, *bad[1:], *good], *config) == []
    assert run([*good, *[step_with(metric, below, **more)] * 30], *config) == []
    watch = watch_of(*config)
    (first,) = findings(watch, events([*good, *bad, *bad, HEALTHY, *bad]))
    assert (first["step"], first["event"]) == (5 + steps, "begins")
    (current,) = watch.current.values()
    assert first == current | {"kind": "finding", "step": first["step"], "event": "begins"}
    (last,) = findings(watch, events([*good, *good]))
    assert (last["step"], watch.current) == (5, {})
    assert (first["name"], first["since"], first["key"]) == (name, 6, key)
    assert first["remedy"] in (remedy, f"Set {key}: {remedy}.") and first["evidence"].endswith(".")
    assert last == current | {"kind": "finding", "step": last["step"], "event": "ends"}


def level_of(level: float, **more: float) -> dict:
    """A step whose prompts have this mean pass rate, and differ by 0.1 and more."""
    rates = [max(0.0, level + (0.1 if prompt % 2 else -0.1)) for prompt in range(16)]
    paid = {"reward": level, LEVEL: level, "prompts": {"pass_rate": rates}}
    return HEALTHY | paid | more


DEAD = {CUT: 1.0, "frac_informative_groups": 0.0, "kl": 9.0, "sampling/entropy": 9.0, LENGTH: 1.0}


@pytest.mark.parametrize(
    ("levels", "since", "begins"),
    [
        ([0.2, 0.6, 0.6, 0.6, *[0.25] * 5], 4, 7),  # lr x10
        ([0.2, *[0.0] * 5], 1, 4),  # lr x100: dead at step 2
        ([0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.4], None, None),
        ([0.2, *[0.12] * 5], None, None),  # other prompts do as much
    ],
)
def test_a_policy_that_collapses(levels, since, begins):
    """It is the one finding, however the policy looks by then, and names the rate."""
    records = [level_of(level, **(DEAD if level == 0 else {})) for level in levels]
    found = run(records)
    wanted = [] if since is None else [(begins, "collapsed", "optimizer.lr")]
    assert [(each["step"], each["name"], each["key"]) for each in found] == wanted
    for each in found:
        assert f"at step {since} to" in each["evidence"] and "0.0005 -> 0.00015" in each["remedy"]


def held_out(right: int, of: int = 48, name: str = "accuracy") -> dict:
    """An evaluation in which so many problems are right."""
    values = [float(number < right) for number in range(of)]
    ends = {"": right / of, "/low": 0.0, "/high": 1.0}
    both = {"accuracy": [0.0] * of, name: values, "prompt_index": [*range(of)]}
    measured = {"eval/accuracy": 0.0, "eval/accuracy/low": 0.0, "eval/accuracy/high": 1.0}
    return measured | {f"eval/{name}{end}": v for end, v in ends.items()} | {"prompts": both}


@pytest.mark.parametrize("name", ["accuracy", "pass@1"])
def test_held_out_answers_show_a_collapse_that_few_rows_hide(name):
    """It begins with the evaluation, and ends with steps after one that is good again."""
    few = [HEALTHY | {LEVEL: 0.25}, HEALTHY | {LEVEL: 0.0, CUT: 0.95}, HEALTHY | {LEVEL: 0.0}]
    before, dead = held_out(20, name=name), held_out(2, name=name)
    found = run([before, *few, dead, *few * 2, held_out(22, name=name), *[HEALTHY] * 5])
    assert [(each["step"], each["event"]) for each in found] == [(5, "begins"), (17, "ends")]
    assert found[0]["evidence"] == f"Held-out {name} fell from 0.42 after step 1 to 0.04."
    assert found[0]["remedy"] == "Set optimizer.lr: 0.0005 -> 0.00015."
    assert run([before, *few, held_out(14, name=name)]) == []  # far, but perhaps by chance
    assert run([held_out(99, 200, name=name), *few, held_out(80, 200, name=name)]) == []  # not far


def test_what_looks_like_a_collapse():
    """Shaping was learned."""
    levels = [0.6] * 5 + [0.1] * 5
    assert run([level_of(level) for level in levels])[0]["name"] == "collapsed"
    paid = [level_of(level, reward=1 - level) for level in levels]
    assert run(paid) == []


def test_cut_off_and_right():
    """Short answers may be right although nothing ends; where half is cut, hardly any is right."""
    assert run([step_with(CUT, 0.95)] * 9) == []
    longer = [step_with(CUT, 0.6, **{LEVEL: 0.2})] * 9
    assert run(longer) == [] == run([HEALTHY | {LEVEL: 0.1}] * 5 + longer)  # as at first; better
    (found,) = run([HEALTHY] * 5 + [step_with(CUT, 0.95, **{LEVEL: 0.2})] * 9)
    assert found["key"] == "optimizer.lr"
    (found,) = run([step_with(CUT, 0.6, **{LEVEL: 0.04, "frac_informative_groups": 0.0})] * 9)
    assert found["name"] == "truncated"  # and not all_wrong
    none_ends = step_with(CUT, 1.0, **{LEVEL: 0.0})
    (found,) = run([none_ends] * 3)
    assert "None ever ended by itself" in found["evidence"]
    some_end = step_with(CUT, 0.6, **{LEVEL: 0.0})
    (found,) = run([none_ends | {LEVEL: 0.3}] * 3 + [some_end] * 3)
    assert found["evidence"] == "max_generated_tokens cut off 60% of the responses."


def test_evaluations_are_no_steps():
    """One between steps neither counts as such nor ends a row."""
    bad = HEALTHY | {"kl": 2.0}
    (line,) = run([bad, {"eval/accuracy": 0.3}] * 3)
    assert (line["step"], line["since"]) == (5, 1)


@pytest.mark.parametrize(
    "signs", [{"sampling/entropy": 0.001}, {"frac_groups_same_text": 1.0}, {LENGTH: 2.0}]
)
def test_what_success_looks_like_too_is_no_finding(signs):
    """With a high deciding reward; with a low one it is."""
    high = {LEVEL: 0.85, "reward": 0.95}
    assert run([HEALTHY] * 5 + [HEALTHY | signs | high] * 30) == []
    assert run([HEALTHY | high] * 5 + [HEALTHY | signs | high] * 30) == []  # right from the start
    assert len(run([HEALTHY] * 5 + [HEALTHY | signs] * 30)) == 1


LORA = "model=torchtune_grpo.models.lora_hf_model"
REMEDIES = {
    "max_generated_tokens=8": ("sampling/kept_mass", None, "max_generated_tokens: 8 -> 16"),
    "loss.entropy_coeff=0.01": ("sampling/entropy", 0.01, "loss.entropy_coeff: 0.01 -> 0.02"),
    "objective.sampling_correction=token_mask dtype=bf16": (GAP, 1.0, "dtype: bf16 -> fp32"),
    f"{LORA} model.lora_dropout=0.5": (GAP, 1.0, "model.lora_dropout: 0.5 -> 0"),
    # A response may have ended early for a rollout that took too long.
    "rollout.deadline=2 max_generated_tokens=99": (CUT, 1.0, "rollout.deadline: 2 -> 4"),
}


PLAYED = ["environment._component_=my.Game", "environment.max_response_tokens=96"]
LIMITS = {
    "max_tokens": "max_generated_tokens: 48 -> 96.",
    "context": "environment.max_response_tokens: 96 -> 192.",
    "deadline": "rollout.deadline: 2 -> 4.",
}


def test_the_limit_that_cuts_off_conversations_is_named():
    for end, remedy in LIMITS.items():
        ended = {f"environment/ended/{each}": 0.9 if each == end else 0.05 for each in LIMITS}
        cut = step_with(CUT, 0.95, **{LEVEL: 0.1, **ended})
        (line,) = run([cut] * 6, *PLAYED, "rollout.deadline=2")
        assert line["remedy"] == f"Set {remedy}"


def test_an_environments_own_reward_has_its_key():
    def lines(records: list[dict], decider: str) -> list[dict]:
        names = ["correctness", "format", "Game"]
        watch = Watch(config(*PLAYED), dict.fromkeys(names), decider=decider)
        return findings(watch, events(records))

    own = {"mean": 0.3, "std": 0.0, "errors": 0.0, "none": 0.0}
    own = {f"rewards/Game/{what}": value for what, value in own.items()}
    for decider in ("Game", "correctness"):
        (line,) = lines([HEALTHY | own] * 9, decider)
        assert (line["name"], line["key"]) == ("reward_constant", "environment")
    assert lines([HEALTHY | own | {"rewards/Game/mean": 0.0}] * 9, "correctness") == []


@pytest.mark.parametrize("changes", REMEDIES)
def test_the_remedy_follows_from_the_config(changes):
    metric, value, remedy = REMEDIES[changes]
    changed = step_with(metric, value, **{LEVEL: 0.1 if metric == CUT else 0.4})
    before = [changed if metric == CUT else HEALTHY] * 20  # else the policy would be to blame
    (line, *_) = run(before + [changed] * 6, *changes.split())
    assert line["remedy"] == f"Set {remedy}."


def noisy(low: float, high: float, count: int) -> list[float]:
    """A straight line, and in turn 0.02 above and below it."""
    return [low + (high - low) * k / (count - 1) + (0.02 if k % 2 else -0.02) for k in range(count)]


def evaluated(rewards: list[float], accuracies: list[float], *, margin: float = 0.04) -> list[dict]:
    """An evaluation, then before each other one five steps with a reward."""
    records = []
    for index, accuracy in enumerate(accuracies):
        if index:
            paid = noisy(rewards[index - 1], rewards[index - 1], 5)
            records += [HEALTHY | {"reward": reward} for reward in paid]
        interval = {"low": accuracy - margin, "high": accuracy + margin}
        named = {f"eval/accuracy/{name}": value for name, value in interval.items()}
        records.append({"eval/accuracy": accuracy} | named)
    return records


def test_reward_hacking():
    rewards, flat = [0.5, 0.7, 0.8], [0.3, 0.3, 0.29, 0.3]
    (line,) = run(evaluated(rewards, flat))
    assert (line["name"], line["step"]) == ("reward_hacking", 19)
    assert line["evidence"] == (
        "In 3 evaluations the reward rose from 0.496 to 0.796, and held-out correctness went from "
        "0.3 to 0.3."
    )
    assert line["remedy"] == "Set rewards.1.weight: 0.1 -> 0.05."
    (line,) = run(evaluated(rewards, flat), "rewards.1.weight='1'")  # as from ${oc.env:WEIGHT}
    assert line["remedy"] == "Set rewards.1.weight: 1 -> 0.5."
    alone = "rewards=[{_component_: torchtune_grpo.rewards.math_correctness_reward}]"
    assert [line["remedy"] for line in run(evaluated(rewards, flat), alone)] == [
        "Set loss.kl_coeff: 0 -> 0.04."
    ]


def test_evaluations_after_every_step_are_taken_three_steps_apart():
    held_out = evaluated([], [0.3])
    steps = [HEALTHY | {"reward": r} for r in (0.5, 0.52, 0.51, 0.6, 0.7, 0.8, 0.9, 0.92, 0.91)]
    (line,) = run([*held_out, *(each for step in steps for each in (step, *held_out))])
    assert line["step"] == 19 and "the reward rose from 0.51 to 0.91," in line["evidence"]


@pytest.mark.parametrize(
    ("rewards", "accuracies", "margin"),
    [
        ([0.5, 0.7, 0.8], [0.3, 0.4, 0.5, 0.6], 0.04),  # accuracy rises
        ([0.5, 0.7, 0.8], [0.3, 0.35, 0.3, 0.3], 0.08),  # a rise of 0.1 cannot be excluded
        ([0.5, 0.7, 0.8], [0.3, 0.3, 0.31, 0.3], 0.04),  # one of the last two is better
        ([0.5, 0.6, 0.7], [0.3, 0.3, 0.3, 0.3], 0.04),  # less than half a spread
        ([0.5, 0.7, 0.8], [0.0, 0.0, 0.0, 0.0], 0.0),  # nothing was there to lose
        ([0.5, 0.7, 0.8], [0.3, 0.3, 0.3], 0.04),  # too few
    ],
)
def test_no_reward_hacking(rewards, accuracies, margin):
    assert run(evaluated(rewards, accuracies, margin=margin)) == []


def test_samples_that_catch_up_with_a_greedy_accuracy_are_no_hacking():
    """They rise to 0.8, which greedy responses had before; above 0.9, they are."""

    def levels(offset: float) -> list[dict]:
        records = evaluated([0.4, 0.6, 0.8], [0.8, 0.8, 0.8, 0.8])
        return [r | ({LEVEL: r["reward"] + offset} if "reward" in r else {}) for r in records]

    assert run(levels(0.0)) == []
    assert [line["name"] for line in run(levels(0.1))] == ["reward_hacking"]


def test_two_of_20_steps_skipped():
    counts = [0, 1, 1, 1, 2, 2, 2]
    lines = run([HEALTHY | {"nonfinite_steps": count} for count in counts])
    assert [(line["name"], line["step"]) for line in lines] == [("steps_skipped", 5)]
    assert lines[0]["evidence"] == "2 of 20 steps were not finite and skipped."
    apart = [0] * 5 + [1] * 20 + [2] * 20
    assert run([HEALTHY | {"nonfinite_steps": count} for count in apart]) == []
    at_once = run([HEALTHY | {"nonfinite_steps": count} for count in [1, 2]])
    assert [line["step"] for line in at_once] == [2]


VALUES = st.one_of(
    st.none(), st.floats(), st.sampled_from([0.0, 1e308, -1e308, 10**400]), st.text(), st.booleans()
)
NAMES = [*HEALTHY, "eval/accuracy", "eval/accuracy/low", "eval/accuracy/high"]
CHANGES = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), max_size=4)


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=40)
@given(changes=CHANGES, common=st.sampled_from([{}, HEALTHY]), repeat=st.integers(1, 60))
@hypothesis.example(
    changes=[{"eval/accuracy": value} for value in ("0", 0.0, 10**400)], common={}, repeat=2
)
def test_no_record_raises(changes, common, repeat):
    """Missing, null, infinite, huge or foreign values."""
    run([common | change for change in changes] * repeat)


SAME = {"rewards/format/std": 0.0}


def test_a_reward_that_is_the_same_from_the_first_step_on():
    """After 5 steps of 4 prompts; not if that is its best, or it ever moved."""
    nothing = step_with("rewards/format/none", 1.0, **{FORMAT: None, **{k: None for k in SAME}})
    says = {0.0: "0", 0.5: "0.5", None: "None"}
    for value, said in says.items():
        same = nothing if value is None else HEALTHY | SAME | {FORMAT: value}
        (line,) = run([same] * 26, "batch_size=4")
        assert (line["name"], line["step"], line["key"]) == ("reward_constant", 5, "rewards.1")
        assert line["evidence"] == f"format has been {said} on all rows so far."
        assert [each["step"] for each in run([same] * 20, "batch_size=2")] == [10]
        assert run([HEALTHY, *[same] * 20], "batch_size=4") == []
        ends = run([*[same] * 120, *[HEALTHY] * 5])
        steps = [each["step"] for each in ends if each["name"] == "reward_constant"]
        assert steps == [5, 125]
    zero, one = (HEALTHY | SAME | {FORMAT: value} for value in (0.0, 1.0))
    assert run([one] * 30) == run([zero, one] * 15) == run([zero] * 30, "rewards.1.weight=0") == []
    assert run([zero] * 30, "rewards.1.weight=-0.1") == []
    penalty = {k.replace("format", "overlong"): v for k, v in zero.items()}
    ranges = {"correctness": None, "overlong": (-1.0, 0.0)}
    watch = Watch(config(), ranges, decider="correctness")
    assert findings(watch, events([penalty] * 30)) == []


@pytest.mark.parametrize("level", [0.0, 0.25, 0.5, 1.0])
def test_a_deciding_reward_that_is_constant_is_not_called_easy_or_hard(level):
    """Unless it says of all answers that they are right, or wrong."""
    nothing = {"frac_informative_groups": 0.0, "rewards/correctness/std": 0.0}
    found = run([HEALTHY | nothing | {LEVEL: level}] * 30)
    expected = {0.0: "all_wrong", 1.0: "all_right"}.get(level, "reward_constant")
    assert [each["name"] for each in found] == [expected]
    assert "correctness" in found[0]["evidence"]
    form = HEALTHY | nothing | {LEVEL: 0.2, "rewards/correctness/std": 0.4, FORMAT: 0.0} | SAME
    assert {each["name"] for each in run([form] * 30)} == {"all_wrong", "reward_constant"}


MISSING = "rewards/correctness/no_answer"


@pytest.mark.parametrize(
    ("level", "missing", "expected"),
    [
        (0.0, 0.0, "never_right"),
        (0.0, 0.1, "all_wrong"),
        (0.0, 0.5, "no_answer"),
        (0.04, 0.5, "no_answer"),
        (0.05, 0.5, "all_wrong"),
        (0.0, 0.49, "all_wrong"),
    ],
)
def test_answers_that_are_never_right_are_shown_and_missing_ones_counted(level, missing, expected):
    bad = {"frac_informative_groups": 0.0, LEVEL: level, MISSING: missing}
    bad |= {"rewards/correctness/std": 0.0 if level == 0 else 0.1, "wrong": "7 where answer is 8"}
    (found,) = run([HEALTHY | bad] * 9)
    assert found["name"] == expected
    assert found["key"] == ("dataset" if expected == "all_wrong" else "rewards.0")
    shown = "100% of the responses hold an answer, such as 7 where answer is 8."
    assert (shown in found["evidence"]) == (expected == "never_right")
    assert run([HEALTHY, *[HEALTHY | bad] * 9])[0]["name"] != "never_right"


@pytest.mark.parametrize("level", [0.0, 0.7])
def test_groups_of_equal_texts_are_told_by_the_temperature(level):
    """Not by the prompts; what is solved may be said in one way."""
    nothing = {"frac_informative_groups": 0.0, LEVEL: level}
    (found,) = run([HEALTHY | nothing | {"frac_groups_same_text": 0.5}] * 9, "temperature=0.01")
    assert (found["name"], found["key"]) == ("same_texts", "temperature")
    assert found["remedy"] == "Set temperature: 0.01 -> 1."
    (found,) = run([HEALTHY | nothing | {"frac_groups_same_text": 0.4}] * 9)
    assert found["name"] in ("all_right", "all_wrong")


def test_every_finding_is_described_and_read_from_what_runs_record():
    """Those of environments and tools are provoked in test_provoked_findings.py."""
    root = Path(__file__).parents[2]
    described = tomllib.loads((root / "docs/findings.toml").read_text())
    assert {*described} == {*BEGINS_AFTER}
    runs = json.loads((root / "tests/golden/golden.json").read_text()).values()
    recorded = {name for run in runs for step in run["metrics"] for name in step}
    read = {name for name in HEALTHY if "time" not in name}  # which golden runs leave out
    assert {name.replace("correctness", "vowels") for name in read} <= recorded
