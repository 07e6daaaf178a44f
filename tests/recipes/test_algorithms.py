"""Each of recipes/configs/algorithms is what its paper says, and trains."""

import pytest
from runs import run

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config, recipes_folder
from torchtune_grpo.config.keys import without_effect
from torchtune_grpo.loss import make_loss

CONFIG = "tiny_arithmetic_grpo"
# The advantage, the aggregation, the ratio and its distances, as the papers have them.
PAPERS = {
    "grpo": ("group", "grpo", "clipped", 0.2, 0.2),
    "dr_grpo": ("none", "dr_grpo", "clipped", 0.2, 0.2),
    "dapo": ("group", "dapo", "clipped", 0.2, 0.28),
    "gspo": ("group", "grpo", "sequence", 3e-4, 4e-4),
    "cispo": ("group", "dapo", "cispo", 1.0, 4.0),
    "scale_rl": ("batch", "prompt", "cispo", 1.0, 4.0),
    "dppo": ("group", "dapo", "dppo", 0.15, 0.15),
    "gdpo": ("group", "dapo", "clipped", 0.2, 0.2),
    "maxrl": ("max_rl", "dr_grpo", "clipped", 0.2, 0.2),
}
FILES = {path.stem for path in recipes_folder().glob("configs/algorithms/*.yaml")}


@pytest.mark.parametrize("name", sorted(FILES | PAPERS.keys()))
def test_an_algorithm_is_what_its_paper_says(name):
    """Whatever algorithm was named before; no key is unknown, or without effect."""
    for before in FILES:
        changes = [f"algorithm={before}", f"algorithm={name}"]
        settings = read_config(load_config(CONFIG, changes))
        assert list(without_effect(settings)) == []
        loss, objective = make_loss(settings.loss), settings.objective
        ratio = "sequence" if loss.importance_sampling_level == "sequence" else loss.surrogate
        found = (objective.advantage, loss.aggregation, ratio, *loss.epsilons)
        assert found == PAPERS[name]
        assert loss.needs_reference == (name == "grpo")
        aggregation = objective.multi_objective_aggregation
        assert (aggregation == "normalize_then_sum") == (name == "gdpo")
        assert (objective.sampling_correction == "old_logprobs") == (name == "dppo")


def test_an_algorithm_lies_between_the_base_and_the_keys_of_a_config(tmp_path):
    """On the command line it changes the file's keys, and the other overrides change its own."""
    file = tmp_path / "my.yaml"
    file.write_text(f"base_config: {CONFIG}\nalgorithm: dapo\nloss: {{epsilon_high: 0.3}}\n")
    cfg = load_config(str(file))
    assert (cfg.loss.aggregation, cfg.loss.epsilon_high, cfg.ppo_epochs) == ("dapo", 0.3, 2)
    assert "algorithm" not in cfg and cfg.batch_size == load_config(CONFIG).batch_size
    cfg = load_config(str(file), ["loss.kl_coeff=0.1", "algorithm=grpo", "ppo_epochs=3"])
    assert (cfg.loss.aggregation, cfg.loss.epsilon_high) == ("grpo", None)
    assert (cfg.loss.kl_coeff, cfg.ppo_epochs) == (0.1, 3)


def test_a_misspelt_algorithm_is_told_the_nearest(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(f"base_config: {CONFIG}\nalgorithm: DAPOO\n")
    for config, *overrides in ([CONFIG, "algorithm=DAPOO"], [str(file)]):
        with pytest.raises(ValueError, match="^algorithm=DAPOO: .*mean dapo. There are cispo"):
            load_config(config, overrides)


TRAINS = """
import sys
from torchtune_grpo import GRPO

def vowels(prompts, completions, **columns):
    return [sum(map(text.count, "aeiou0123")) % 4 / 3 for text in completions]

def length(prompts, completions, **columns):
    return [len(text) % 3 / 2 for text in completions]

for name in sys.argv[1:]:
    with GRPO(
        "tiny_arithmetic_grpo", algorithm=name, rewards=[vowels, length], temperature=2.0,
        num_steps=1, batch_size=4, grpo_samples=4, max_generated_tokens=8, output_dir=name,
        dataset={"num_samples": 8}, eval_dataset=None,
    ) as run:
        run.train()
        print(name, run.metrics[-1]["grad_norm"])
"""


@pytest.mark.slow
def test_every_algorithm_takes_a_step_of_its_own(tmp_path):
    (tmp_path / "mine.py").write_text(TRAINS)
    done = run("mine.py", *sorted(FILES), cwd=tmp_path)
    norms = dict(line.split() for line in done.out.splitlines() if line.split()[0] in FILES)
    assert norms.keys() == FILES and all(float(norm) > 0 for norm in norms.values())
    assert len({*norms.values()}) >= 6 and "No effect" not in done.err
