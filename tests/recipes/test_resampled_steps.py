"""Steps that are full at once, fill up, stay short, or have nothing to train on."""

import pytest
import torch
from runs import NO_EVALUATION, ROWS, completions, metrics, prompts, run_tiny, weights

from torchtune_grpo.data import ShuffledSampler

CONFIG, SEED = "llama3_2_1B_lora_grpo", 2
# In which steps a prompt teaches something: its completions' letters decide, else nothing does.
REWARD = """
TEACHES = {teaches}

def reward_some(prompts, completions, trainer_state, number, **columns):
    step = trainer_state.global_step
    return [
        float(sum(map(ord, text)) % 7) if n in TEACHES[step] else 1.0
        for text, n in zip(completions, number)
    ]
"""
ORDER = ShuffledSampler(range(ROWS), seed=SEED).next(ROWS) * 2
ORDER[ROWS:] = ShuffledSampler(range(ROWS), seed=SEED).next(ROWS, skip=ROWS)

SETTINGS = f"""
rewards=[my_rewards.reward_some] dtype=fp32 seed={SEED} loss.kl_coeff=0.1
saving.every_n_steps=1 saving.keep_last=null optimizer=torch.optim.AdamW optimizer.lr=1e-2
lr_scheduler.num_warmup_steps=0 log_groups=99
""".split()
SETTINGS += NO_EVALUATION


def trained(out, step):
    """Read the weights and the optimizer's state."""
    folder = out / f"step_{step:06d}"
    state = torch.load(folder / "training_state.pt", weights_only=True)["optimizer"]["state"]
    held = [torch.as_tensor(value) for entry in state.values() for value in entry.values()]
    return [*weights(folder).values(), *held]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.slow
def test_steps_take_as_many_prompts_as_they_need(tmp_path):
    """Step 1 is full at once, 2 has nothing, 3 fills up, 4 (resumed, more rounds) stays short."""
    teaches = {0: set(ORDER[:2]), 1: set(), 2: {ORDER[6], ORDER[8]}, 3: {ORDER[14]}}
    assert ORDER[14] not in ORDER[9:14]
    (tmp_path / "my_rewards.py").write_text(REWARD.format(teaches=teaches))
    out, rounds = tmp_path / "out", "dynamic_sampling.max_resamples"
    run_tiny(CONFIG, tmp_path, *SETTINGS, f"{rounds}=1", "num_steps=3")
    assert same(trained(out, 1), trained(out, 2)) and not same(trained(out, 2), trained(out, 3))
    again = [f"{rounds}=3", "num_steps=4", "resume_from_checkpoint=true"]
    resumed = run_tiny(CONFIG, tmp_path, *SETTINGS, *again)
    assert "dynamic_sampling" in resumed.out + resumed.err
    assert not same(trained(out, 3), trained(out, 4))

    done = metrics(out)
    drawn = [each["prompt_index"] for each in prompts(out, "step")]
    assert drawn == [ORDER[:2], ORDER[2:6], ORDER[6:9], ORDER[9:16]]
    names = ("rounds", "kept", "missing")
    assert [[line[f"dynamic_sampling/{name}"] for name in names] for line in done] == [
        [0, 1, 0],
        [1, 0, 2],
        [1, pytest.approx(2 / 3), 0],
        [3, pytest.approx(1 / 7), 1],
    ]
    assert (done[1]["loss"], done[1]["grad_norm"]) == (0, 0) and "entropy" not in done[1]
    for line in done:  # of all that was sampled
        assert line["frac_informative_groups"] == pytest.approx(line["dynamic_sampling/kept"])
    assert len(completions(out)) == 4 * (2 + 4 + 3 + 7)
