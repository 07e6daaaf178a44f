"""A foreign engine samples from the trainer's policy, whatever has changed in it: vLLM, for now.

The tests know only the protocol of engines; another one is one more entry in ``ENGINES``.
"""

import math
import os
from dataclasses import replace

import pytest
import torch
from hf_models import MODELS, hf_folder
from policies import full_logprobs

from torchtune_grpo.config.keys import RolloutConfig, SamplingParams
from torchtune_grpo.machine import interrupt
from torchtune_grpo.models import hf_model, lora_hf_model
from torchtune_grpo.models.layers import standardize
from torchtune_grpo.models.weights import HFCheckpointer
from torchtune_grpo.rollout.request import EngineContext, RolloutRequest
from torchtune_grpo.rollout.sampling import row_keys

pytest.importorskip("vllm")

from torchtune_grpo.rollout.vllm import VLLMEngine  # noqa: E402

ENGINES = {"vllm": VLLMEngine}
CPU = torch.device("cpu")
KNOWN = 290  # ids that are sampled, of the models' 300
BOS = 1  # config.json's; a prompt has as many as it is given
PROMPTS = [[5, 6, 7, 8, 9] * 14, [5, 6, 7, 8, 9] * 13 + [1], [BOS, 12]]  # two begin alike
# Heads of this size are among those that vLLM computes on a CPU. The ends in config.json do not
# end a response; those of the request do.
WIDE = dict(hidden_size=128, head_dim=32, bos_token_id=BOS, eos_token_id=[*range(100, 200)])
OTHERS = {
    kind: name for name, (kind, _) in MODELS.items() if kind != "llama" and name != "phi3_longrope"
}
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
        assert length and samples.sampled[n].sum() == length
        largest = max(largest, difference.max().item())
    return largest


def rows(samples) -> list[list[int]]:
    pairs = zip(samples.responses.tolist(), samples.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in pairs]


def checksum(model) -> list[float]:
    return [p.double().sum().item() + p.double().square().sum().item() for p in model.parameters()]


@torch.no_grad()
def change(parameter) -> None:
    generator = torch.Generator().manual_seed(parameter.numel())
    noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    parameter.add_(noise * (0.5 * parameter.float().std() if parameter.dim() > 1 else 0.3))


@pytest.fixture(params=ENGINES)
def start(request):
    """Makes an engine for a model, and ends it after the test."""
    started = []

    def make(model, folder, *, max_rows=None, merge_adapters="auto", **arguments):
        settings = RolloutConfig(max_rows=max_rows)
        context = EngineContext(model, settings, CPU, model_dir=str(folder))
        started.append(ENGINES[request.param](context, merge_adapters=merge_adapters, **arguments))
        return started[-1]

    yield make
    for engine in started:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "llama_biases"])
def test_every_weight_that_changes_is_sampled_with(name, start, tmp_path):
    folder = hf_folder(name, tmp_path / "model", **WIDE)
    model = load(folder)
    engine = start(model, folder)
    asked = request()
    before = engine.generate(asked)
    assert gap(model, asked, before) < 1e-4
    groups: dict[str, list] = {}
    for parameter_name, parameter in model.named_parameters():
        layerless = ".".join(part for part in parameter_name.split(".") if not part.isdigit())
        groups.setdefault(layerless, []).append(parameter)
    assert len(groups) >= 10
    for parameters in groups.values():  # the same prompts each time, so that stale keys would show
        for parameter in parameters:
            change(parameter)
        trained = checksum(model)
        after = engine.generate(asked)
        assert gap(model, asked, after) < 1e-4
        assert checksum(model) == trained
    assert rows(after) != rows(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS.values())
def test_each_family_is_the_trainers_before_and_after_a_change(name, start, tmp_path):
    windows = {"sliding_window": 64} if MODELS[name][1].get("sliding_window") else {}
    folder = hf_folder(name, tmp_path / "model", **WIDE, **windows)
    model = load(folder)
    engine, asked = start(model, folder), request([PROMPTS[0], PROMPTS[2]])
    assert gap(model, asked, engine.generate(asked)) < 1e-4
    for parameter in model.parameters():
        change(parameter)
    assert gap(model, asked, engine.generate(asked)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "lora_beside"])
def test_each_adapter_alone_is_sampled_with(kind, start, tmp_path):
    dora, folder = kind == "dora", hf_folder("llama3", tmp_path / "model", **WIDE)
    model = load(folder, build=lora_hf_model, use_dora=dora, **LORA)
    merge = "never" if kind == "lora_beside" else "auto"
    engine, asked = start(model, folder, merge_adapters=merge), request()
    without = engine.generate(asked)
    modules = [module for module in model.modules() if hasattr(module, "adapter_params")]
    assert len(modules) == 14
    trained = {n: p for n, p in model.named_parameters() if "lora" not in n and "mag" not in n}
    frozen = [parameter.clone() for parameter in trained.values()]
    for module in modules:
        b = module.lora_b.weight
        for scale in (0.1, 0.2):  # the same adapter twice: its change is not added to the last
            with torch.no_grad():
                b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(1)) * scale)
                if dora:
                    module.magnitude.mul_(1.1)
            samples = engine.generate(asked)
            assert gap(model, asked, samples) < 1e-4
        differ = (samples.sampler_logprobs - without.sampler_logprobs)[:, 0].abs().max()
        assert differ > 1e-3
        with torch.no_grad():
            b.zero_()
            if dora:
                module.magnitude.div_(1.1**2)
    again = engine.generate(asked)
    torch.testing.assert_close(again.sampler_logprobs, without.sampler_logprobs)
    assert all(map(torch.equal, frozen, trained.values()))


@pytest.mark.slow
def test_twenty_merges_in_bf16_do_not_drift(start, tmp_path):
    folder = hf_folder("llama3", tmp_path / "model", **WIDE)
    model = load(folder, build=lora_hf_model, dtype=torch.bfloat16, **LORA)
    engine, asked = start(model, folder), request(group_size=1)
    first = engine.generate(asked)
    adapters = [m.lora_b.weight for m in model.modules() if hasattr(m, "adapter_params")]
    for step in range(20):
        with torch.no_grad():
            for b in adapters:
                b.fill_(0.01 * (step + 1) if step < 19 else 0.0)
        last = engine.generate(asked)
    assert rows(last) == rows(first)
    assert torch.equal(last.sampler_logprobs, first.sampler_logprobs)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = hf_folder("llama3", tmp_path_factory.mktemp("llama") / "model", **WIDE)
    return load(folder), folder


@pytest.mark.slow
def test_samples_follow_their_reported_distribution(llama, start):
    model, folder = llama
    engine = start(model, folder)
    for temperature in (1.0, 0.6):
        count = 3000
        asked = request([[5, 6]], group_size=count, max_generated_tokens=1, temperature=temperature)
        samples = engine.generate(asked)
        assert gap(model, request([[5, 6]], temperature=temperature), first_of(samples, 4)) < 1e-4
        with torch.no_grad():
            logits = model(torch.tensor([[5, 6]]))[0, -1, :KNOWN] / temperature
        expected = count * logits.double().softmax(dim=-1)
        seen = torch.bincount(samples.responses[:, 0], minlength=KNOWN).double()
        assert len(seen) == KNOWN  # no id that the tokenizer lacks
        often = expected >= 5  # the others are counted together
        seen, expected = (torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, expected))
        squares = ((seen - expected).square() / expected).sum().item()
        assert squares < len(seen) + 5 * math.sqrt(2 * len(seen))  # chi-square's mean, deviation


def first_of(samples, count):
    return replace(samples, **{name: value[:count] for name, value in vars(samples).items()})


@pytest.mark.slow
def test_ends_noise_and_order(llama, start, monkeypatch):
    model, folder = llama
    engine = start(model, folder, max_rows=5)  # fewer than the 12 rows
    asked = request()
    whole = engine.generate(asked)
    assert whole.truncated.all() and whole.lengths.tolist() == [10] * 12
    assert len({tuple(row) for row in rows(whole)}) > 9
    assert rows(engine.generate(request(seed=1))) != rows(whole)
    alone = engine.generate(request(PROMPTS[:1]))
    assert rows(alone) == rows(whole)[:4]  # whatever else is sampled, as it depends on keys
    torch.testing.assert_close(
        alone.sampler_logprobs, whole.sampler_logprobs[:4], atol=1e-5, rtol=0
    )

    stop = rows(whole)[0][3]
    ended = engine.generate(request(stops=(stop,)))
    for row, full, truncated in zip(rows(ended), rows(whole), ended.truncated, strict=True):
        end = full.index(stop) + 1 if stop in full else len(full)
        assert row == full[:end]  # the stop token included
        assert truncated == (stop not in full)
    assert gap(model, asked, ended) < 1e-4

    spelled = rows(whole)[1][2:4]
    decode = lambda tokens: "".join(f"<{token}>" for token in tokens)  # noqa: E731
    string = decode(spelled)[1:-1]  # begins and ends within a token
    ended = engine.generate(request(stop_strings=(string,), decode=decode))
    assert len(rows(ended)[1]) <= 4 and not ended.truncated[1]
    assert string in decode(rows(ended)[1]) and string not in decode(rows(ended)[1][:-1])

    greedy = request(temperature=0.0)
    samples = engine.generate(greedy)
    assert gap(model, greedy, samples) < 1e-4 and not samples.behaviour_logprobs.any()
    assert rows(samples)[0] == rows(samples)[3]

    told = []
    monkeypatch.setattr(interrupt, "is_interrupted", lambda: len(told) > 1)
    monkeypatch.setattr("torchtune_grpo.rollout.vllm.REPORT_SECONDS", 0.0)
    cut = engine.generate(replace(asked, report=told.append))
    assert len(told) == 2 and told[-1].rows == 12 and told[-1].live == 5
    assert sorted(cut.lengths.tolist()) == [0] * 7 + [2] * 5 and cut.truncated.all()
    monkeypatch.undo()
    assert rows(engine.generate(asked)) == rows(whole)  # nothing of the cut one is left


@pytest.mark.slow
def test_rows_that_wait_for_memory_are_the_same(llama, start):
    roomy, tight = start(*llama), start(*llama, memory_share=1e-9)  # of one row's keys and values
    asked = request(group_size=20, max_generated_tokens=40)
    assert rows(tight.generate(asked)) == rows(roomy.generate(asked))


@pytest.mark.slow
def test_another_policy_is_told_in_the_rollout(start, tmp_path, monkeypatch):
    folder = hf_folder("llama3", tmp_path / "model", **WIDE)
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype=dtype)
        engine = start(model, folder)
        for temperature in (1.0, 0.0):
            one = dict(group_size=1, max_generated_tokens=1, temperature=temperature)
            engine.generate(request([[5]], **one))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_bring_weights", lambda: None)
            for parameter in model.parameters():
                change(parameter)
            with pytest.raises(ValueError, match="samples from another policy"):
                engine.generate(request())
        engine.generate(request())
    model.norm.scale.data.fill_(math.nan)
    with pytest.raises(ValueError, match="a log-prob is infinite or NaN: the policy broke"):
        engine.generate(request())


def test_what_it_cannot_sample_is_refused_by_name(llama, start):
    engine = start(*llama)
    for values in ({"top_k": 5}, {"min_new_tokens": 2}, {"suppressed_tokens": (3,)}):
        with pytest.raises(ValueError, match=f"^{next(iter(values))}=.*set rollout.engine to nat"):
            engine.generate(request(**values))
    with pytest.raises(ValueError, match="^temperature=0.001: .* takes 0.01"):
        engine.generate(request(temperature=0.001))
    with pytest.raises(ValueError, match="max_model_len=512: .* 570 tokens"):
        engine.generate(request(max_generated_tokens=500))


@pytest.mark.slow
def test_the_process_is_left_as_it_was(llama, start):
    before = dict(os.environ), torch.set_num_threads, torch.get_num_threads(), torch.get_rng_state()
    affinity = os.sched_getaffinity(0)
    engine = start(*llama)
    engine.generate(request())
    assert dict(os.environ) == before[0]
    assert torch.set_num_threads is before[1] and torch.get_num_threads() == before[2]
    assert torch.equal(torch.get_rng_state(), before[3])
    assert os.sched_getaffinity(0) == affinity
    engine.close()
    assert not torch.distributed.is_initialized()
    assert full_logprobs(llama[0], torch.tensor([1, 2, 3]), 1.0).isfinite().all()
