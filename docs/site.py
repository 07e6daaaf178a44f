"""Pages that `mkdocs build` adds to those in docs/: the repository's own, and generated ones."""

import json
import os
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from torchtune_grpo.config import aliases
from torchtune_grpo.config.check import markdown_table
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.monitor.findings import BEGINS_AFTER

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "measurements.md",
    "docs/metrics.toml": "metrics.md",
    "docs/findings.toml": "findings.md",
    "docs/first_run.ipynb": "first_run.md",
    "recipes/configs": "configs.md",
    "recipes/configs/algorithms": "configs.md",
}
NOTEBOOK = DOCS / "first_run.ipynb"
CLASSES = {  # what a config or a script of one's own names
    "From Python": ["api.GRPO"],
    "Data": [
        "data.RLDataset",
        "data.ShuffledSampler",
        "data.samplers.Sampler",
        "data.arithmetic_dataset",
        "data.number_dataset",
        "data.gsm8k_dataset",
        "data.humaneval_dataset",
        "data.reasoning_gym_dataset",
    ],
    "Rewards": [
        "rewards.math_correctness_reward",
        "rewards.SymbolicMathReward",
        "rewards.choice_reward",
        "rewards.short_text_reward",
        "rewards.CodeReward",
        "rewards.ProgramReward",
        "rewards.ReasoningGymReward",
        "rewards.OverlongPenalty",
        "rewards.RewardScores",
    ],
    "Models": [
        "models.hf_model",
        "models.lora_hf_model",
        "models.transformers_model",
        "models.hf_tokenizer",
        "models.HFCheckpointer",
    ],
    "Advantages": ["advantages"],
    "The loss, and a fork's rows": [
        "loss.Loss",
        "loss.GRPOLoss",
        "loss.LossOutput",
        "loss.loss_weights",
        "loss.clipped_surrogate",
        "loss.cispo_surrogate",
        "loss.dppo_surrogate",
        "loss.kl_penalty",
        "trajectory.Trajectory",
    ],
    "Engines": [
        "rollout.request.RolloutEngine",
        "rollout.request.Capabilities",
        "rollout.request.EngineContext",
        "rollout.request.RolloutRequest",
        "trajectory.Samples",
    ],
}

METRICS = """# Metrics

Names are TRL's where it has one. Times are the slowest rank's seconds.

| Metric of a step | What it is |
|---|---|"""
PASSES = "¹ Over rows that get a pass ([objectives](objectives.md#advantages))."
FINDINGS = """# It does not learn

A run says so itself: its findings stand on the terminal, in `run.jsonl` and on its page, with the
key to change. Change one thing at a time, and [plan](plan.md) before the next run. Causes by what
you see are [here](faq.md).

A finding begins when its signs have lasted as many steps as the column "For" says, and ends after
five without them.
"Solved": the deciding reward has a mean of 0.8.

| Finding | Signs | For | Change |
|---|---|---|---|"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in PAGES.items():
        if source.endswith(".md"):
            text = site_links((ROOT / source).read_text(), Path(source).parent)
            files.append(File.generated(config, page, content=text))
    for page, text in generated().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links that leave docs/ to the site's pages."""
    written = page.file.generated_by is None
    return site_links(markdown, Path("docs")) if written else markdown


def site_links(text: str, folder: Path) -> str:
    """Turn links between files of the repository, from one in ``folder``, into the site's."""

    def moved(match: re.Match[str]) -> str:
        target = os.path.normpath(folder / match[1])
        code = "api.md" if target.endswith(".py") else None
        page = PAGES.get(target, code or os.path.relpath(target, "docs"))
        return f"]({page}{match[2] or ''})"

    return re.sub(r"\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)", moved, text)


def generated() -> dict[str, str]:
    """Return the pages that are made from the package, by name."""
    keys = f"# Config keys\n\n{markdown_table(GRPOConfig)}"
    return {
        "config.md": mentioned(keys),
        "coming_from.md": mentioned(aliases.markdown()),
        "configs.md": configs(),
        "metrics.md": metrics(),
        "findings.md": findings(),
        "first_run.md": notebook(),
        "api.md": api(),
    }


def mentioned(text: str) -> str:
    """Turn pages that a docstring mentions (docs/data.md) into links."""
    return re.sub(r"\bdocs/(\w+)\.md", r"[\1](\1.md)", text)


def configs() -> str:
    text = "# Shipped configs\n\n`tune cp NAME mine.yaml` copies one.\n"
    folder = ROOT / "recipes" / "configs"
    for path in sorted(folder.glob("*.yaml")) + sorted(folder.glob("algorithms/*.yaml")):
        kind = "algorithm: " if path.parent.name == "algorithms" else ""
        text += f"\n## {kind}{path.stem}\n\n```yaml\n{path.read_text()}```\n"
    return text


def metrics() -> str:
    table = tomllib.loads((DOCS / "metrics.toml").read_text())
    rows = [f"| {names} | {meaning} |" for names, meaning in table.items()]
    return site_links("\n".join([METRICS, *rows, "", PASSES]), Path("docs"))


def findings() -> str:
    table = tomllib.loads((DOCS / "findings.toml").read_text())
    rows = []
    for name, (steps, groups) in BEGINS_AFTER.items():
        signs, change = table[name]
        lasts = f"{steps} step{'s' * (steps > 1)}" + (f", {groups} groups" if groups else "")
        rows.append(f"| `{name}` | {signs} | {lasts} | {change} |")
    return "\n".join([FINDINGS, *rows])


def notebook() -> str:
    """Return the notebook as a page, without what its cells print."""
    texts = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        text = "".join(cell["source"])
        texts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    first, *others = texts
    link = f"[This page as a notebook]({NOTEBOOK.name})"
    return "\n\n".join([first, link, *others])


def api() -> str:
    # Every word stands there, so that it would be the search's first answer to most.
    text = "---\nsearch: {boost: 0.2}\n---\n\n# Classes and functions\n\n"
    text += "What a config, a script or a fork names.\n"
    for title, names in CLASSES.items():
        text += f"\n## {title}\n"
        text += "".join(f"\n::: torchtune_grpo.{name}\n" for name in names)
    return text
