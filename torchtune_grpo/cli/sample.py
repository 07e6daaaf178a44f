"""``torchtune-grpo sample``: prints what a policy answers.

    torchtune-grpo sample llama3_2_1B_lora_grpo --prompt "What is 3 + 4?"
    torchtune-grpo sample OUTPUT_DIR temperature=0.7 --num-prompts 2

Prompts are encoded like those of the config's data set: system prompt, chat format and prefill.
Without one, the first ones of the data set are taken, and the rewards score the responses. The
weights are those of the newest checkpoint in ``output_dir``; before the first one, or with
``--base``, those that training starts from.
"""

from __future__ import annotations

import argparse

from torchtune_grpo.cli.arguments import add_run, open_run
from torchtune_grpo.config.errors import told_in_one_line
from torchtune_grpo.config.text import visible
from torchtune_grpo.data import collate_prompts
from torchtune_grpo.rollout import roll_out
from torchtune_grpo.run import Run


def main() -> None:
    """Entry point of ``torchtune-grpo sample``."""
    parser = argparse.ArgumentParser(
        prog="torchtune-grpo sample", description="Prints what a policy answers."
    )
    add_run(parser)
    parser.add_argument("--prompt", action="append", default=[], help="may be repeated")
    parser.add_argument("--num-prompts", type=int, default=1, help="of the data set (default: 1)")
    parser.add_argument("--samples", type=int, help="for each prompt (default: grpo_samples)")
    parser.add_argument("--base", action="store_true", help="take the weights before training")
    args = parser.parse_intermixed_args()
    with told_in_one_line():
        run = open_run(args)
        run.join()
        _print_samples(run, args)
        run.close()


def _print_samples(run: Run, args: argparse.Namespace) -> None:
    if args.prompt:
        items = run.items_of(args.prompt)
    else:
        items = [run.dataset[i] for i in range(min(args.num_prompts, len(run.dataset)))]
    group_size = args.samples or run.cfg.grpo_samples
    rows = roll_out(
        run.load_engine(None if args.base else run.newest_checkpoint()),
        collate_prompts(items),
        tokenizer=run.tokenizer,
        group_size=group_size,
        params=run.cfg.sampling_params,
        prefill=run.dataset.prefill,
        seed=run.cfg.seed,
        step=0,
    )
    verdicts = [""] * rows.num_rows
    if not args.prompt:
        scores = run.rewards(
            prompts=rows.prompts,
            completions=rows.completions,
            columns=rows.columns,
            completion_ids=rows.completion_ids,
        )
        verdicts = [f", reward {total:.3f}" for total in scores.total.tolist()]
    for row, completion in enumerate(rows.completions):
        if row % group_size == 0:
            print(f"\n=== {visible(rows.prompts[row])}")
        length = int(rows.response_lengths[row])
        cut = ", cut off" if rows.truncated[row] else ""
        print(f"\n--- sample {row % group_size + 1}: {length} tokens{cut}{verdicts[row]}")
        print(visible(completion))
