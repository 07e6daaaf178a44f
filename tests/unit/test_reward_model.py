"""RewardModel: what transformers itself gives, whatever the batch and the process."""

import json

import pytest
import torch
import yaml
from hf_models import MODELS, SHAPE
from hf_tokenizers import write_tokenizer
from test_docs import block
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from torchtune_grpo.rewards import RewardSet, TrainerState
from torchtune_grpo.trajectory import Completion, message

PROMPTS = ["1 + 1?", "1 + 1?", "Why?", "Why?", "Tell me."]
ANSWERS = ["2", "<think>12</think>It is 2.", "Because " * 9, "I think so.", "x" * 30]


def reward_model(folder, **changes):
    """Write a model with one output, and the tokenizer of Qwen 3."""
    write_tokenizer(folder, "qwen3")
    kind, own = MODELS["qwen3"]
    settings = SHAPE | own | {"vocab_size": 384, "num_labels": 1, "pad_token_id": 0} | changes
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        model.score.weight.mul_(50)  # scores of about 1
    model.save_pretrained(folder)
    return folder


def scored(folder, *, prompts=PROMPTS, completions=ANSWERS, share=0.0, **settings):
    (node,) = yaml.safe_load(block("model", "yaml"))["rewards"]
    node |= {"model_dir": str(folder), **settings}
    rewards = RewardSet.from_config([node], max_failure_share=share)
    state = TrainerState(global_step=0, max_steps=1)
    scores = rewards(prompts=prompts, completions=completions, columns={}, trainer_state=state)
    rewards.close()
    return scores


def by_transformers(folder):
    """Score each conversation alone; return the scores, and a conversation's mean tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores, tokens = [], 0
    for prompt, answer in zip(PROMPTS, ANSWERS):
        turns = [message("user", prompt), message("assistant", answer.rpartition("</think>")[2])]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        tokens += ids.numel()
        with torch.no_grad():
            scores.append(model(input_ids=ids).logits.item())
    return torch.tensor(scores), tokens / len(scores)


@pytest.mark.parametrize("pad", [0, None])
def test_scores_are_transformers_own(tmp_path, pad, monkeypatch):
    """In batches, in any order, and without a token for padding; its cost is logged."""
    monkeypatch.setattr("torchtune_grpo.rewards.model.multiplies_bf16", lambda device: False)
    folder = reward_model(tmp_path / "model", pad_token_id=pad)
    expected, tokens = by_transformers(folder)
    assert expected.std() > 0.1
    state = torch.get_rng_state()
    for size in (1, 2, 5):
        scores = scored(folder, batch_size=size)
        torch.testing.assert_close(scores.total, expected)
        assert scores.metrics == [("reward_model/tokens", tokens)]
    reverse = scored(folder, prompts=PROMPTS[::-1], completions=ANSWERS[::-1], batch_size=2)
    torch.testing.assert_close(reverse.total.flip(0), expected)
    assert torch.get_rng_state().equal(state)


def test_a_conversation_is_read_whole(tmp_path):
    folder = reward_model(tmp_path / "model")
    turns = [message("assistant", "Let me see."), message("user", "Well?")]
    turns.append(message("assistant", "2"))
    answers = ["2", Completion("2", turns)]
    alone, whole = scored(folder, prompts=["1 + 1?"] * 2, completions=answers).total
    assert alone != whole


@pytest.mark.slow
def test_a_workers_process_gives_the_same(tmp_path):
    folder = reward_model(tmp_path / "model")
    apart = scored(folder, isolation="process", timeout=60.0, workers=1, batch_size=1)
    assert apart.total.equal(scored(folder, batch_size=1).total)


def test_a_conversation_that_is_too_long_has_failed(tmp_path):
    folder = reward_model(tmp_path / "model", max_position_embeddings=100)
    scores = scored(folder, prompts=["?"] * 2, completions=["a", "b" * 100], share=0.5)
    assert scores.failed[:, 0].tolist() == [False, True]


def test_folders_that_are_refused(tmp_path):
    folder = reward_model(tmp_path / "model")
    for name, change, said in (
        (
            "config.json",
            {"id2label": {"0": "a", "1": "b"}},
            "has num_labels=2, chat template: True",
        ),
        ("chat_template.jinja", None, "num_labels=1, chat template: False; give"),
    ):
        file = folder / name
        before = file.read_text()
        file.unlink()
        if change:
            file.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(ValueError, match=said):
            scored(folder)
        file.write_text(before)
    for wrong, batch_size in ((folder, 0), (tmp_path / "modle", 1)):
        said = f"batch_size={batch_size}, model_dir={wrong}: 1 or more, a folder"
        with pytest.raises(ValueError, match=said):
            scored(wrong, batch_size=batch_size)
