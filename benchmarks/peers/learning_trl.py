"""The demo beside TRL's ``GRPOTrainer``: seconds and samples to what is held out.

    python benchmarks/peers/learning_trl.py --work-dir FOLDER --picture docs/learning_trl.png
    python benchmarks/peers/learning_trl.py --work-dir FOLDER --seeds 0 --ways trl \\
        --trl learning_rate=3e-4

Both start from one warmed-up model (made in ``--work-dir`` where it is missing), and train the same
prompts in a shuffled order of their own with the same rewards, groups, longest answers and float32
weights, in one thread. Both are evaluated by this package on the config's held-out problems, with
the same noise, every ``--every`` rollouts. ``--ours`` are keys of ``tiny_arithmetic_grpo`` beside
those in ``OURS`` (``num_steps`` is the number of rollouts of both), ``--trl`` arguments of
``GRPOConfig`` beside those in ``TRL``.

A process each. Counted are the clock's seconds and the CPU's, from the first rollout on, without
evaluations, imports and loading. A run that has ended in ``--work-dir`` is not repeated. Prints one
JSON line: for each run its settings and points, and for each way the median over the seeds of
samples and seconds to the levels, and where it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONFIG = Path(__file__).parents[2] / "recipes/configs/tiny_arithmetic_grpo.yaml"
LEVELS = (0.9, 0.95)
# Found by trial on seed 0: of the rates that end at 0.97 or more, the one that gets to 0.95 first.
OURS = ["optimizer.lr=7e-4", "num_steps=12"]
TRL = {
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "num_iterations": 1,
    "per_device_train_batch_size": 256,
}
COLUMNS = ("samples", "seconds", "cpu_seconds", "pass@1")


class Clock:
    """Seconds so far, of the clock and of the CPU, without what lies between two laps."""

    def __init__(self) -> None:
        self.seconds, self.cpu_seconds = 0.0, 0.0
        self.start()

    def start(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._begun[0]
        self.cpu_seconds += time.process_time() - self._begun[1]


class Watch:
    """A metric logger of the recipe: an evaluation's line ends with the clock set anew."""

    def __init__(self, file: str, samples: int) -> None:
        self._file, self._samples, self._clock = Path(file), samples, Clock()

    def log_config(self, config: Any) -> None: ...

    def log_dict(self, payload: dict[str, float], step: int) -> None:
        if "eval/pass@1" in payload:
            point = step * self._samples, self._clock.seconds, self._clock.cpu_seconds
            with self._file.open("a") as file:
                file.write(json.dumps([*point, payload["eval/pass@1"]]) + "\n")
        else:
            self._clock.stop()
        self._clock.start()

    def close(self) -> None: ...


def load_config(args: argparse.Namespace) -> Any:
    """The demo's, with the changed keys."""
    folder = f"model_dir={args.work_dir / 'tiny_llama'}"
    mine = OmegaConf.from_dotlist([folder, *OURS, *args.ours])
    return OmegaConf.merge(OmegaConf.load(CONFIG), mine)


def run_ours(args: argparse.Namespace, seed: int, file: Path) -> None:
    """The recipe, by ``tune``."""
    cfg = load_config(args)
    folder = file.with_suffix("")
    keys = [f"output_dir={folder}", f"model_dir={cfg.model_dir}", f"seed={seed}", "prepare.seed=0"]
    keys += [f"evaluation.every_n_steps={args.every}", *OURS, *args.ours]
    keys += ["metric_logger._component_=learning_trl.Watch", "~metric_logger.log_dir"]
    keys += [f"metric_logger.file={file}"]
    keys += [f"metric_logger.samples={cfg.batch_size * cfg.grpo_samples}"]
    command = [Path(sys.executable).parent / "tune", "run", "grpo_full_finetune_single_device"]
    command += ["--config", CONFIG, *keys]
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env=os.environ | path)


def run_trl(args: argparse.Namespace, seed: int, file: Path) -> None:
    """``GRPOTrainer.train`` on the same prompts, each step between two callbacks."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from torchtune_grpo.rewards import math_correctness_reward, math_format_reward
    from torchtune_grpo.run import Run

    given = load_config(args)
    given.seed, given.output_dir, given.prepare.seed = seed, str(file.with_suffix("")), 0
    run = Run(given)
    cfg, tokenizer, dataset = run.cfg, run.tokenizer, run.dataset
    items = [dataset[i] for i in range(len(dataset))]
    words = AutoTokenizer.from_pretrained(cfg.model_dir)
    prompts = [words.decode(item["tokens"]) for item in items]
    assert words(prompts[0])["input_ids"] == items[0]["tokens"]
    rows = cfg.batch_size * cfg.grpo_samples

    def completed(reward: Any) -> Any:
        def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
            texts = [dataset.prefill + text for text in completions]
            return reward(prompts=prompts, completions=texts, **columns)

        score.__name__ = reward.__name__
        return score

    settings: dict[str, Any] = {**TRL, **OmegaConf.to_container(OmegaConf.from_dotlist(args.trl))}
    updates = rows // settings["per_device_train_batch_size"]
    settings.setdefault("gradient_accumulation_steps", updates)
    model = AutoModelForCausalLM.from_pretrained(cfg.model_dir, dtype="float32")
    # A step of theirs is an optimizer step; several of them share a rollout.
    steps_per_rollout = settings["num_iterations"] * updates
    steps_per_rollout //= settings["gradient_accumulation_steps"]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[completed(math_correctness_reward), completed(math_format_reward)],
        args=GRPOConfig(
            output_dir=str(file.with_suffix("")),
            reward_weights=[1.0, 0.1],
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            generation_batch_size=rows,
            num_generations=cfg.grpo_samples,
            max_completion_length=cfg.max_generated_tokens,
            temperature=cfg.temperature,
            beta=0.0,
            loss_type="grpo",
            optim="adamw_torch",
            weight_decay=0.0,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine",
            max_steps=cfg.num_steps * steps_per_rollout,
            seed=seed,
            **settings,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": text, **item["columns"]} for text, item in zip(prompts, items, strict=True)]
        ),
        processing_class=words,
    )
    clock = Clock()

    def evaluate(rollouts: int) -> None:
        value = held_out(cfg, run.eval_dataset, tokenizer, trainer.model)
        point = rollouts * rows, clock.seconds, clock.cpu_seconds, value
        with file.open("a") as out:
            out.write(json.dumps(point) + "\n")

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.start()

        def on_step_end(self, settings: Any, state: Any, *args: Any, **kwargs: Any) -> None:
            clock.stop()
            rollouts, rest = divmod(state.global_step, steps_per_rollout)
            if not rest and (rollouts % every == 0 or rollouts == cfg.num_steps):
                evaluate(rollouts)

    every = args.every
    trainer.add_callback(Steps())
    evaluate(0)
    trainer.train()


def held_out(cfg: Any, dataset: Any, tokenizer: Any, model: Any) -> float:
    """pass@1 of a transformers model, as the recipe's evaluations measure it."""
    import torch

    from torchtune_grpo.evaluation.evaluator import Evaluator
    from torchtune_grpo.models import HFCheckpointer, hf_model
    from torchtune_grpo.rewards import RewardSet
    from torchtune_grpo.rollout import make_engine

    folder = Path(cfg.output_dir) / "policy"
    shutil.copytree(cfg.model_dir, folder, dirs_exist_ok=True)
    model.save_pretrained(folder)
    checkpointer = HFCheckpointer(checkpoint_dir=str(folder), output_dir=str(folder) + "_out")
    policy = hf_model(str(folder))
    policy.load_state_dict(checkpointer.load_checkpoint()["model"])
    rewards = RewardSet.from_config(cfg.rewards)
    evaluator = Evaluator(cfg, dataset, tokenizer=tokenizer, rewards=rewards)
    with torch.no_grad():
        return evaluator(make_engine(policy.eval(), cfg.rollout)).metrics["eval/pass@1"]


RUN = {"ours": run_ours, "trl": run_trl}


def points(way: str, seed: int, args: argparse.Namespace) -> list[list[float]]:
    """A run in a process of its own, unless it has ended already."""
    file = args.work_dir / f"{way}_{seed}.jsonl"
    ended = file.with_suffix(".ended")
    if not ended.exists():
        file.unlink(missing_ok=True)
        command = [sys.executable, *sys.argv, "--in-this-process", "--ways", way]
        # TRL looks for the model's name on the hub.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command += ["--seeds", str(seed)]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        ended.touch()
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary(runs: list[list[list[float]]]) -> dict[str, Any]:
    """Medians over a way's seeds; None where a seed did not get there."""
    result: dict[str, Any] = {"final pass@1": [round(run[-1][3], 3) for run in runs]}
    result["samples"] = runs[0][-1][0]
    for number, name in enumerate(COLUMNS[1:3], start=1):
        result[name] = round(statistics.median(run[-1][number] for run in runs), 1)
    for level in LEVELS:
        first = [next((point for point in run if point[3] >= level), None) for run in runs]
        for number, name in enumerate(COLUMNS[:3]):
            each = [None if point is None else round(point[number], 1) for point in first]
            median = None if None in each else statistics.median(map(float, each))
            result[f"{name} to {level}"] = {"median": median, "each": each}
    return result


def draw(results: dict[str, list[list[list[float]]]], picture: Path) -> None:
    """Held-out pass@1 against samples, and against CPU seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    names = {"ours": "torchtune-grpo", "trl": "TRL"}
    for color, (way, runs) in zip(("C0", "C1"), results.items(), strict=False):
        for number, run in enumerate(runs):
            label = names[way] if number == 0 else None
            look: dict[str, Any] = {"color": color, "marker": "o", "ms": 3, "lw": 1.2}
            for each, column in zip(axes, (0, 2), strict=True):
                each.plot([p[column] for p in run], [p[3] for p in run], label=label, **look)
    axes[0].set(xlabel="samples", ylabel="held-out pass@1", ylim=(0, 1.02))
    axes[1].set(xlabel="CPU seconds of training")
    for each in axes:
        each.axhline(0.95, color="0.6", lw=0.8, ls="--")
        each.grid(alpha=0.3)
        each.legend(loc="lower right")
    figure.savefig(picture, dpi=100)


def main() -> None:
    """Runs what is missing, compares, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", choices=RUN, default=[*RUN])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=1, help="rollouts between evaluations")
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--trl", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work_dir = args.work_dir.resolve()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.in_this_process:
        (way,), (seed,) = args.ways, args.seeds
        return RUN[way](args, seed, args.work_dir / f"{way}_{seed}.jsonl")
    results = {way: [points(way, seed, args) for seed in args.seeds] for way in args.ways}
    if args.picture:
        draw(results, args.picture)
    settings = {"seeds": args.seeds, "ours": OURS + args.ours, "trl": TRL, "trl_more": args.trl}
    ways = {way: summary(runs) | {"points": runs} for way, runs in results.items()}
    print(json.dumps({"benchmark": "learning_trl", "settings": settings, "results": ways}))


if __name__ == "__main__":
    main()
