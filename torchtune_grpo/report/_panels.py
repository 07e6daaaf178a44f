"""Which curves a page shows, what each one means, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from torchtune_grpo.plain import visible
from torchtune_grpo.report._run import Record, Run, number
from torchtune_grpo.report._verdict import names_of_scores

MAX_POINTS = 1000  # of a curve; of a longer run, every k-th step is drawn
NUM_COLOURS = 7
PASS_RATES = ("none right", "few: up to 1/3", "some: up to 2/3", "most", "all right")


@dataclass(frozen=True)
class Line:
    """One curve: values over steps, None where a step has none.

    ``low`` and ``high`` bound a band around it; in a stack they are the area itself. ``colour`` is
    the number of one in page.css.
    """

    label: str
    steps: list[int]
    values: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None
    colour: int = 1


@dataclass(frozen=True)
class Panel:
    """One picture: its title, what it is and what is good, how its axis goes, its curves."""

    title: str
    what: str
    names: tuple[tuple[str, str], ...] = ()  # of metrics, and what they are called here
    band: tuple[str, str] | None = None  # metrics around the first curve
    axis: Literal["free", "from 0", "share"] = "free"
    kind: Literal["lines", "dots", "stack"] = "lines"
    lines: list[Line] = field(default_factory=list)


_REWARD = Panel(
    "Reward",
    "Mean total reward; the band is the usual spread within a group. Good: it rises, then levels "
    "off. Without a spread there is nothing to learn from.",
    (("reward", "reward"),),
)
_HELD_OUT = Panel(
    "Held-out accuracy",
    "On problems that are never trained on, with 95 % intervals. Good: rises with the reward. If "
    "only the reward rises, the rewards are being tricked.",
    axis="share",
    kind="dots",
)
_PARTS = Panel(
    "Each reward",
    "Mean of each reward before its weight. Good: the one for right answers rises, not only the "
    "one for format.",
)
_PANELS = (
    Panel(
        "Informative groups",
        "Share of groups whose answers were not all scored alike; only these teach. Near 0 the "
        "problems are too easy or too hard.",
        (("frac_informative_groups", "informative"),),
        axis="share",
    ),
    Panel(
        "Length in tokens",
        "Mean length of a response, shortest and longest as a band. Good: steady or slow.",
        (("completions/mean_length", "mean"),),
        ("completions/min_length", "completions/max_length"),
        axis="from 0",
    ),
    Panel(
        "Cut off",
        "Share of responses that hit max_generated_tokens or the deadline. Good: near 0; these "
        "never state their answer.",
        (("completions/clipped_ratio", "cut off"),),
        axis="share",
    ),
    Panel(
        "Entropy",
        "How undecided the policy is at each token. Good: a slow fall. At 0 it no longer explores; "
        "a rise without end is noise.",
        (("entropy", "entropy"),),
        axis="from 0",
    ),
    Panel(
        "KL from the reference",
        "How far the policy has moved from the model it began with. Good: grows slowly.",
        (("kl", "KL"),),
        axis="from 0",
    ),
    Panel(
        "Sampler against trainer",
        "Mean difference of a token's log-prob between the two. Good: tiny and steady; otherwise "
        "the update is for another policy.",
        (("sampling/sampling_logp_difference/mean", "difference"),),
        axis="from 0",
    ),
    Panel(
        "Clipped tokens",
        "Share of tokens whose update was clipped. Good: a few per cent at most; 0 with one update "
        "a step (ppo_epochs: 1).",
        (("clip_ratio/region_mean", "clipped"), ("cispo_clip_ratio", "clipped (CISPO)")),
        axis="from 0",
    ),
    Panel(
        "Gradient norm",
        "Before clipping. Good: no lone spikes; each is a step that may have done harm.",
        (("grad_norm", "norm"),),
        axis="from 0",
    ),
)
_SECONDS = Panel(
    "Seconds of a step",
    "Where the time goes, stage upon stage. The largest is what to speed up.",
    (
        ("time/rollout", "rollout"),
        ("time/reward", "rewards"),
        ("time/logprobs", "log-probs"),
        ("time/update", "update"),
    ),
    axis="from 0",
    kind="stack",
)


def panels(run: Run) -> list[Panel]:
    """The curves of one run; those without any number are left out."""
    steps = thinned(run.steps)
    names = sorted({key for record in run.steps for key in record})
    parts = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    filled = [
        replace(_REWARD, lines=_around(steps, "reward", "reward_std_in_group")),
        replace(_HELD_OUT, lines=[_scores(run, name) for name in names_of_scores(run)]),
        replace(_PARTS, lines=[_line(steps, part, part.split("/", 1)[1][:-5]) for part in parts]),
        *(_filled(panel, steps) for panel in _PANELS),
        replace(_SECONDS, lines=stacked([_line(steps, *name) for name in _SECONDS.names])),
    ]
    return [panel for panel in map(_drawable, filled) if panel.lines]


def compared_panels(runs: Sequence[Run], names: Sequence[str]) -> list[Panel]:
    """Each picture's first curve, of all runs over each other."""
    of_runs = [{panel.title: panel for panel in panels(run)} for run in runs]
    together = []
    for panel in (_REWARD, _HELD_OUT, *_PANELS):
        lines = [
            replace(mine[panel.title].lines[0], label=name)
            for mine, name in zip(of_runs, names, strict=True)
            if panel.title in mine
        ]
        if panel is not _HELD_OUT:  # bands of several runs hide each other
            lines = [replace(line, low=None, high=None) for line in lines]
        if lines:
            together.append(_drawable(replace(panel, lines=lines)))
    return together


def pass_rate_panel(run: Run) -> list[Panel]:
    """The share of groups by how many of their answers are right, at each step."""
    records = [record for record in thinned(run.prompts) if record.get("pass_rate")]
    if not records:
        return []
    shares: list[list[float | None]] = [[] for _ in PASS_RATES]
    for record in records:
        rates = [rate for rate in map(number, record["pass_rate"]) if rate is not None]
        kinds = [0 if r <= 0 else 4 if r >= 1 else 1 + (r > 1 / 3) + (r > 2 / 3) for r in rates]
        for kind, share in enumerate(shares):
            share.append(kinds.count(kind) / max(1, len(rates)))
    steps = [record["step"] for record in records]
    return [
        Panel(
            "How many of a group's answers are right",
            "Share of groups at each step. Only the three in the middle teach: where none or all "
            "are right, the answers cannot be told apart. Good: a broad middle that moves to the "
            "right answers.",
            axis="share",
            kind="stack",
            lines=stacked(
                [
                    Line(name, steps, share, colour=11 + kind)
                    for kind, (name, share) in enumerate(zip(PASS_RATES, shares, strict=True))
                ]
            ),
        )
    ]


def thinned(records: list[Record], limit: int = MAX_POINTS) -> list[Record]:
    """At most ``limit`` lines, evenly; the last one stays."""
    every = -(-len(records) // limit) or 1
    return records[::-1][::every][::-1]


def stacked(lines: list[Line]) -> list[Line]:
    """Each line's area on top of those before it; a missing value takes no room."""
    columns = [list(accumulate(value or 0.0 for value in each)) for each in zip(*_values(lines))]
    highs = [list(row) for row in zip(*columns)]
    lows = [[0.0] * len(columns), *highs]
    return [replace(line, low=low, high=high) for line, low, high in zip(lines, lows, highs)]


def _values(lines: list[Line]) -> list[list[float | None]]:
    return [line.values for line in lines]


def _line(steps: list[Record], name: str, label: str) -> Line:
    values = [number(record.get(name)) for record in steps]
    return Line(visible(label), [record["step"] for record in steps], values)


def _filled(panel: Panel, steps: list[Record]) -> Panel:
    lines = [_line(steps, *name) for name in panel.names]
    if panel.band:
        low, high = (_line(steps, name, name).values for name in panel.band)
        lines[0] = replace(lines[0], low=low, high=high)
    return replace(panel, lines=lines)


def _around(steps: list[Record], name: str, spread: str) -> list[Line]:
    line, widths = _line(steps, name, name), _line(steps, spread, spread).values
    pairs = list(zip(line.values, widths, strict=True))
    low = [None if v is None or w is None else v - w for v, w in pairs]
    high = [None if v is None or w is None else v + w for v, w in pairs]
    return [replace(line, low=low, high=high)]


def _scores(run: Run, name: str) -> Line:
    line = _line(run.evaluations, f"eval/{name}", name)
    ends = (_line(run.evaluations, f"eval/{name}/{end}", end).values for end in ("low", "high"))
    low, high = ends
    return replace(line, low=low, high=high)


def _drawable(panel: Panel) -> Panel:
    """Without the curves that have no number, the others in colours that differ."""
    lines = [line for line in panel.lines if any(value is not None for value in line.values)]
    coloured = [replace(line, colour=1 + n % NUM_COLOURS) for n, line in enumerate(lines)]
    return replace(panel, lines=coloured)
