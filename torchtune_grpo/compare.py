"""What a run has changed: ``python -m torchtune_grpo.compare OUTPUT_DIR``.

Answers the first held-out prompts greedily, with the weights that training started from and with
those of the newest checkpoint, and says which answers are right. The config is the one that the run
has left in its folder; start this in the folder that the run was started in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import nn

from torchtune_grpo._components import instantiate
from torchtune_grpo.command_line import load_config
from torchtune_grpo.config import GRPOConfig
from torchtune_grpo.data import RLDataset, collate_prompts
from torchtune_grpo.device import find_device
from torchtune_grpo.errors import told_in_one_line
from torchtune_grpo.memory import keep_freed_memory
from torchtune_grpo.plain import visible
from torchtune_grpo.policy import empty_model
from torchtune_grpo.read_config import check_checkpoint_files, read_config
from torchtune_grpo.rewards import RewardSet
from torchtune_grpo.rollout import make_engine, roll_out
from torchtune_grpo.sample import leave_out_own_keys, load_policy
from torchtune_grpo.threads import limit_threads

CONFIG_FILE = "torchtune_config.yaml"  # torchtune's metric loggers write it


def main() -> None:
    """Entry point of ``python -m torchtune_grpo.compare``."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_grpo.compare", description="Answers before and after training."
    )
    parser.add_argument("output_dir", type=Path, help="the run's output_dir")
    parser.add_argument("--num-prompts", type=int, default=3, help="held-out ones (default: 3)")
    args = parser.parse_args()
    file = args.output_dir / CONFIG_FILE
    if not file.is_file():
        parser.error(f"{file} does not exist; give the output_dir of a run that made a step.")
    with told_in_one_line():
        cfg = load_config(str(file), [f"output_dir={args.output_dir}"])
        leave_out_own_keys(cfg, [])
        print("\n".join(compared(read_config(cfg), num_prompts=args.num_prompts)))


def compared(cfg: GRPOConfig, *, num_prompts: int) -> list[str]:
    """Lines that show the prompts, and each one's answers before and after with their verdicts."""
    device = find_device(cfg.device)
    if device.type == "cpu":
        keep_freed_memory()
        limit_threads(empty_model(cfg))
    check_checkpoint_files(cfg)
    tokenizer = instantiate("tokenizer", cfg.tokenizer)
    name = "dataset" if cfg.eval_dataset is None else "eval_dataset"
    dataset = instantiate(name, getattr(cfg, name), tokenizer)
    rewards = RewardSet.from_config(cfg.rewards)
    answers = [
        _answers(
            load_policy(cfg, device=device, base=base),
            cfg,
            dataset,
            tokenizer,
            rewards,
            num_prompts,
        )
        for base in (True, False)
    ]
    rewards.close()
    lines = []
    for (prompt, *before), (_, *after) in zip(*answers, strict=True):
        lines += ["", f"=== {prompt}"]
        for title, (verdict, text) in (("before", before), ("after", after)):
            lines += [f"--- {title}: {verdict}", text]
    return lines


def _answers(
    model: nn.Module,
    cfg: GRPOConfig,
    dataset: RLDataset,
    tokenizer: object,
    rewards: RewardSet,
    num_prompts: int,
) -> list[tuple[str, str, str]]:
    """Prompt, verdict and greedy answer of the first prompts."""
    rows = roll_out(
        make_engine(model.eval(), cfg.rollout),
        collate_prompts([dataset[i] for i in range(min(num_prompts, len(dataset)))]),
        tokenizer=tokenizer,
        group_size=1,
        params=cfg.sampling_params.greedy,
        prefill=dataset.prefill,
        seed=0,
        step=-1,
    )
    scores = rewards(
        prompts=rows.prompts,
        completions=rows.completions,
        columns=rows.columns,
        completion_ids=rows.completion_ids,
    )
    column = rewards.names.index(cfg.eval_reward) if cfg.eval_reward else 0
    return [
        (visible(prompt), _verdict(score), visible(text))
        for prompt, score, text in zip(
            rows.prompts, scores.scores[:, column].tolist(), rows.completions, strict=True
        )
    ]


def _verdict(score: float) -> str:
    return {0.0: "wrong", 1.0: "right"}.get(score, f"reward {score:.3f}")


if __name__ == "__main__":
    main()
