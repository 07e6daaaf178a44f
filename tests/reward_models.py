"""Folders of tiny reward models, as transformers writes them."""

from pathlib import Path
from typing import Any

import torch
from hf_models import MODELS, SHAPE
from hf_tokenizers import write_tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification


def reward_model(folder: Path, **changes: Any) -> Path:
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
