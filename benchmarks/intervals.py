"""How often a 95 % interval of ``torchtune_grpo.evaluation.statistics`` holds what it should.

    python benchmarks/intervals.py --draws 400

Draws prompts of which each has its own chance of a right answer, and k samples of each; counts in
how many draws the interval of the mean holds the true mean, and that of the plain bootstrap. Prints
one JSON line.
"""

import argparse
import json
from itertools import product

import numpy as np

from torchtune_grpo.evaluation.statistics import _interval, bootstrap_interval

# Parameters of the beta distribution of the chances: hard, easy, half solved, all alike.
CHANCES = ((0.1, 5), (0.2, 2), (2, 0.2), (0.5, 0.5), (1, 1), (30, 30), (3, 60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=400)
    draws = parser.parse_args().draws
    draw = np.random.default_rng(1)
    results = []
    for prompts, samples, (a, b) in product((20, 48, 128), (1, 4, 8), CHANCES):
        held = np.zeros(2)
        for _ in range(draws):
            values = draw.binomial(samples, draw.beta(a, b, prompts)) / samples
            plain = _interval(values, added=(), weight=1.0)
            for i, (low, high) in enumerate((bootstrap_interval(values), plain)):
                held[i] += low - 1e-9 <= a / (a + b) <= high + 1e-9
        results.append((prompts, samples, round(a / (a + b), 3), *(held / draws)))
    summary = {"worst": min(r[3] for r in results), "mean": np.mean([r[3] for r in results])}
    summary |= {"plain worst": min(r[4] for r in results)}
    summary["plain mean"] = np.mean([r[4] for r in results])
    rounded = {name: round(float(value), 3) for name, value in summary.items()}
    print(json.dumps({"draws": draws, "settings": len(results), **rounded}))


if __name__ == "__main__":
    main()
