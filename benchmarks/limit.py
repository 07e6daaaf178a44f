"""A step of a config beside its matrix products by themselves, which are the machine's limit.

    PYTHONPATH=benchmarks/real python benchmarks/limit.py benchmarks/real/gsm8k.yaml \
        max_generated_tokens=48 sampling.stop_strings=[]

Takes one step on one thread, notes the shapes of all its products, and then makes each of these
again with random factors. Prints one JSON line: for the rollout and the update, the CPU seconds,
those of the products alone, and how many times as long the whole takes.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from common import apart, report
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.recipes.grpo_full_finetune import GRPOFullFinetuneRecipe

PRODUCTS = {getattr(torch.ops.aten, n) for n in ("mm", "addmm", "addmm_", "bmm", "baddbmm")}
Shapes = Counter[tuple[tuple[Any, ...], ...]]


class Products(TorchDispatchMode):
    """Counts matrix products by their factors' shapes, dtype, and whether they are transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Shapes = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            factors = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.found[tuple((tuple(x.shape), x.dtype, x.stride(-1) != 1) for x in factors)] += 1
        return func(*args, **(kwargs or {}))


def alone(found: Shapes) -> float:
    """Return the CPU seconds of these products by themselves."""
    total = 0.0
    for factors, count in found.items():
        a, b = (random_factor(*factor) for factor in factors)
        torch.matmul(a, b)
        repeats = min(count, 5)
        start = time.process_time()
        for _ in range(repeats):
            torch.matmul(a, b)
        total += (time.process_time() - start) / repeats * count
    return total


def random_factor(shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool) -> torch.Tensor:
    if not is_transposed:
        return torch.randn(shape, dtype=dtype)
    return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT


def measure(config: str, overrides: list[str]) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    keys = [*overrides, "eval_dataset=null", "resume_from_checkpoint=false"]
    with tempfile.TemporaryDirectory() as folder:
        cfg = load_config(config, [f"output_dir={folder}/out", *keys])
        recipe = GRPOFullFinetuneRecipe(cfg)
        recipe.setup(cfg)
        torch.set_num_threads(1)
        rows, step = recipe.rollout(StepMetrics()), StepMetrics()
        result = {}

        def part(name: str, work: Callable[[], Any]) -> Any:
            start = time.process_time()
            with Products() as products:
                value = work()
            taken = time.process_time() - start
            limit = alone(products.found)
            times = {"CPU seconds": taken, "products alone": limit, "ratio": taken / limit}
            result[name] = {key: round(x, 2) for key, x in times.items()}
            return value

        rows = part("rollout", lambda: recipe.rollout(step))
        part("update", lambda: [recipe.update(b, step) for b in recipe.mini_batches(rows, step)])
        result["rows"] = {
            "sampled": len(rows.response_mask),
            "tokens": int(rows.response_mask.sum()),
        }
        recipe.cleanup()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it")
    args = parser.parse_args()
    report("limit", args, **apart(measure, args.config, args.overrides))


if __name__ == "__main__":
    main()
