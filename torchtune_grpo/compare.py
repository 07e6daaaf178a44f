"""What a run has changed: ``python -m torchtune_grpo.compare OUTPUT_DIR``.

Answers the first held-out prompts greedily, with the weights that training started from and with
those of the newest checkpoint, and says which answers are right. The config is the one that the run
has left in its folder; start this in the folder that the run was started in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtune_grpo.command_line import load_config
from torchtune_grpo.components import instantiate
from torchtune_grpo.config import GRPOConfig
from torchtune_grpo.errors import told_in_one_line
from torchtune_grpo.plain import visible
from torchtune_grpo.read_config import read_config
from torchtune_grpo.sample import generate, leave_out_own_keys, load_policy, open_run, score

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
    device, tokenizer = open_run(cfg)
    name = "dataset" if cfg.eval_dataset is None else "eval_dataset"
    dataset = instantiate(name, getattr(cfg, name), tokenizer)
    items = [dataset[i] for i in range(min(num_prompts, len(dataset)))]
    lines = [["", f"=== {visible(item['prompt'])}"] for item in items]
    for title, base in (("before", True), ("after", False)):
        rows = generate(
            load_policy(cfg, device=device, base=base),
            items,
            tokenizer=tokenizer,
            params=cfg.sampling_params.greedy,
            group_size=1,
            prefill=dataset.prefill,
            seed=cfg.seed,
        )
        scores = score(cfg, rows)
        verdicts = scores.scores[:, scores.names.index(cfg.eval_reward or scores.names[0])]
        for shown, verdict, text in zip(lines, verdicts.tolist(), rows.completions, strict=True):
            shown += [f"--- {title}: {_verdict(verdict)}", visible(text)]
    return sum(lines, [])


def _verdict(score: float) -> str:
    return {0.0: "wrong", 1.0: "right"}.get(score, f"reward {score:.3f}")


if __name__ == "__main__":
    main()
