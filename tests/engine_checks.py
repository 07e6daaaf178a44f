"""Models, requests and checks for engines other than the trainer's own."""

from dataclasses import replace

import torch
from scripted_turns import limited_reply

from torchtune_grpo.config.keys import SamplingParams
from torchtune_grpo.models import hf_model
from torchtune_grpo.models.layers import standardize
from torchtune_grpo.models.weights import HFCheckpointer
from torchtune_grpo.rollout.request import RolloutRequest
from torchtune_grpo.rollout.sampling import row_keys

CPU = torch.device("cpu")
KNOWN = 290  # ids that are sampled, of the models' 300
BOS = 1  # config.json's; a prompt has as many as it is given
PROMPTS = [[5, 6, 7, 8, 9] * 14, [5, 6, 7, 8, 9] * 13 + [1], [BOS, 12]]  # two begin alike
# Heads of this size are among those that vLLM computes on a CPU. The ends in config.json do not
# end a response; those of the request do.
WIDE = dict(hidden_size=128, head_dim=32, bos_token_id=BOS, eos_token_id=[*range(100, 200)])
LORA = dict(
    lora_attn_modules=["q_proj", "k_proj", "v_proj", "output_proj"],
    apply_lora_to_mlp=True,
    lora_rank=4,
    lora_alpha=12,
)


def load(folder, *, dtype=torch.float32, build=hf_model, **settings):
    """The model of a folder as a trainer has it."""
    with torch.random.fork_rng():
        model = build(str(folder), **settings)
    standardize(model)
    weights = HFCheckpointer(str(folder), str(folder)).load_checkpoint()["model"]
    model.load_state_dict(weights, strict=False)
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
    for name, parameter in model.named_parameters():
        if "lora" not in name and "magnitude" not in name:  # these stay float32
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def request(prompts=PROMPTS, *, group_size=4, seed=0, stops=(), decode=None, **params):
    return RolloutRequest(
        prompts=prompts,
        group_size=group_size,
        params=SamplingParams(**{"max_generated_tokens": 10, **params}),
        stop_tokens=stops,
        keys=row_keys(seed=seed, step=0, prompt_indices=range(len(prompts)), group_size=group_size),
        decode=decode,
        vocab_size=KNOWN,
    )


@torch.no_grad()
def gap(model, asked, samples) -> float:
    """The largest difference to the log-probs of all rows' tokens by the trainer's full forward."""
    largest = 0.0
    for n, length in enumerate(samples.lengths.tolist()):
        prompt = asked.prompts[n // asked.group_size]
        row = torch.tensor([*prompt, *samples.responses[n, :length].tolist()])
        logits = model(row[None])[0, len(prompt) - 1 : -1, :KNOWN].double()
        log_p = (logits / (asked.params.temperature or 1.0)).log_softmax(dim=-1)
        own = log_p.gather(1, row[len(prompt) :, None])[:, 0]
        difference = (own - samples.sampler_logprobs[n, :length].double()).abs()
        sampled = samples.sampled[n, :length]
        assert length and (asked.turns or sampled.all()) and not samples.sampled[n, length:].any()
        largest = max(largest, difference[sampled].max().item())
    return largest


def rows(samples) -> list[list[int]]:
    pairs = zip(samples.responses.tolist(), samples.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in pairs]


@torch.no_grad()
def change(parameter) -> None:
    generator = torch.Generator().manual_seed(parameter.numel())
    noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    parameter.add_(noise * (0.5 * parameter.float().std() if parameter.dim() > 1 else 0.3))


def spell(tokens) -> str:
    return "".join(f"<{token}>" for token in tokens)


TALKS = {  # what a turn ends with, by how it is told
    "tokens": (dict(stops=tuple(range(2, 60))), lambda turn: turn[-1:] and 2 <= turn[-1] < 60),
    "strings": (
        dict(stop_strings=("7>", "1><2"), decode=spell),  # the second spans two tokens
        lambda turn: "7>" in spell(turn) or "1><2" in spell(turn),
    ),
}


def conversation(kind, **options):
    options = {"max_generated_tokens": 14, **TALKS[kind][0], **options}
    return replace(request(**options), row_limit=30)


def assert_plays(model, asked, samples, turns, *, ends) -> None:
    """All that is returned follows from the tokens that were sampled."""
    limits = turns.limits
    assert gap(model, asked, samples) < 1e-4
    for n, row in enumerate(rows(samples)):
        mask, begin, reply = [True] * len(row), 0, None
        for turn, (_, response, sampled) in enumerate(a for a in turns.asked if a[0] == n):
            assert row[: len(response)] == response and sampled == sum(mask[: len(response)])
            assert ends(response[begin:]) and not ends(response[begin:-1])
            reply = limited_reply(n, response, turn, sampled, limits)
            begin = len(response) + len(reply)
            assert row[len(response) : begin] == reply
            mask[len(response) : begin] = [False] * len(reply)
        assert samples.sampled[n, : len(row)].tolist() == mask
        assert samples.truncated[n] == (reply != [])
        if samples.truncated[n]:
            assert not ends(row[begin:]) and (sum(mask) == limits[0] or len(row) == limits[1])
        else:
            assert len(row) == begin
    assert not samples.sampler_logprobs[~samples.sampled].any()
    assert not samples.behaviour_logprobs[~samples.sampled].any()
