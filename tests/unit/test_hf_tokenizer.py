"""A tokenizer from a model's folder: prompts are those that transformers makes of the template."""

import json

import pytest
from hf_tokenizers import FAMILIES, write_tokenizer
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.data import RLDataset
from torchtune_grpo.data.chat import PromptEncoder
from torchtune_grpo.models import hf_tokenizer
from torchtune_grpo.rollout.request import decode_tokens

CASES = [
    ("llama3_2", {"date_string": "26 Jul 2024"}),
    ("qwen2_5", {}),
    ("qwen3", {}),
    ("qwen3", {"enable_thinking": True}),
    ("qwen3", {"enable_thinking": False}),
    ("smollm2", {}),
    ("deepseek_r1_distill", {}),
    ("gemma3", {}),
]
QUESTIONS = ["1+1?", "  What is\n\n12 , 13 ?\n", "\n\nÜber 数 🙂 {{ x }} {% if %}", "a<b>c|d"]
CONVERSATION = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
    {"role": "user", "content": "Sure?"},
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf_tokenizers")
    return {name: write_tokenizer(root / name, name) for name in FAMILIES}


@pytest.fixture(scope="session")
def load(folders):
    return lambda name, *settings: hf_tokenizer(str(folders[name]), *settings)


@pytest.mark.parametrize("system", [None, "Put it between <think> and </think>."])
@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_prompts_are_those_of_the_models_template(folders, load, name, kwargs, system):
    theirs = AutoTokenizer.from_pretrained(folders[name])
    encoder = PromptEncoder(load(name, kwargs), system_prompt=system)
    first = [{"role": "system", "content": system}] if system else []
    for prompt in [*QUESTIONS, CONVERSATION]:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        expected = theirs.apply_chat_template(
            first + turns, add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert encoder(prompt) == expected
        assert encoder.messages(prompt) == first + turns


def decoded(encoder, prompt):
    return encoder._tokenizer.decode(encoder(prompt), skip_special_tokens=False)


def test_control_text_in_calls_of_tools_stays_text(load):
    tokenizer = load("qwen3")
    call = {"function": {"name": "f<|im_start|>", "arguments": {"x": ["<|im_end|>"]}}}
    turns = [
        {"role": "user", "content": "Call f."},
        {"role": "assistant", "content": "Yes.", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    plain = json.loads(json.dumps(turns).replace("<|", "").replace("|>", ""))
    tokens, expected = map(PromptEncoder(tokenizer), (turns, plain))
    for id_ in tokenizer.special_tokens.values():
        assert tokens.count(id_) == expected.count(id_)


@pytest.mark.parametrize("content", ["", None])
def test_a_call_of_a_tool_needs_no_words(folders, load, qwen2_tokenizer, content):
    """torchtune's tokenizers would leave out the call."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        {"role": "user", "content": "Call f."},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    (item,) = RLDataset(load("qwen3"), rows=[{"prompt": turns}])
    theirs = AutoTokenizer.from_pretrained(folders["qwen3"])
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert item["tokens"] == expected and '"name": "f"' in theirs.decode(expected)
    with pytest.raises(ValueError, match="Qwen2Tokenizer writes no tool_calls"):
        RLDataset(qwen2_tokenizer, rows=[{"prompt": turns}])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma"])
def test_control_text_in_data_stays_text(load, name):
    """Nor does anything vanish: what the encoder writes between, and looks like it, is kept."""
    tokenizer = load(name)
    encoder = PromptEncoder(tokenizer)
    control = {*tokenizer.special_tokens.values()}

    def marks(prompt):
        return [token for token in encoder(prompt) if token in control]

    cut = tokenizer.CUT
    for text in [*tokenizer.special_tokens, *FAMILIES[name].special, f"{cut}{cut[0]}{cut}{cut[1]}"]:
        attack = f"a {text}\n{text}{text}z"
        assert marks(attack) == marks("a"), text
        assert attack in decoded(encoder, attack)
        plain = PromptEncoder(tokenizer, chat=False)(attack)
        assert [token for token in plain if token in control] == plain[: tokenizer._adds_bos]
        if name != "deepseek_r1_distill":  # which puts the system's in front, and once
            row = [{"role": "system", "content": attack}, {"role": "user", "content": "b"}]
            calm = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
            assert marks(row) == marks(calm)


def test_turns_are_marked_by_tokens_that_are_not_special(load):
    """DeepSeek's are; the tags of thinking are words of a prompt, and white space is no mark."""
    deepseek = load("deepseek_r1_distill").special_tokens.keys()
    assert {"<｜User｜>", "<｜Assistant｜>"} < deepseek and "<think>" not in deepseek
    template = {"chat_template": "<think>{{ messages[0].content }}</think>"}
    for name, settings in (("deepseek_r1_distill", template), ("gemma3", {})):
        assert {*load(name, settings).special_tokens} == {*FAMILIES[name].special}


def test_the_prefill_continues_the_template(folders, load):
    theirs = AutoTokenizer.from_pretrained(folders["qwen3"])
    text = theirs.apply_chat_template(
        [{"role": "user", "content": "1+1?"}], add_generation_prompt=True, tokenize=False
    )
    for prefill in ("<think>", "<think>\n", " So, "):
        encoder = PromptEncoder(load("qwen3"), prefill=prefill)
        assert encoder("1+1?") == theirs(text + prefill)["input_ids"]
        assert encoder.prefill == prefill


def test_graders_see_the_think_block_that_a_template_opens(load):
    always = load("deepseek_r1_distill")
    data = RLDataset(always, rows=[{"prompt": "1+1?"}], prefill="Well")
    assert data.prefill == "<think>\nWell"
    assert always.decode(data[0]["tokens"]).endswith(data.prefill)
    with pytest.raises(ValueError, match="^prefill='<think>': .*opens <think> itself.*Remove"):
        RLDataset(always, rows=[{"prompt": "1+1?"}], prefill="<think>")
    assert PromptEncoder(always, chat=False).prefill == ""
    never = load("qwen3", {"enable_thinking": False})
    assert PromptEncoder(never, prefill="So").prefill == "So"


def test_dates_stand_still(load):
    fixed = decoded(PromptEncoder(load("llama3_2")), "hi")
    assert "Today Date: 26 Jul 2024\n" in fixed
    other = PromptEncoder(load("llama3_2", {"date_string": "1 Jan 2030"}))
    assert decoded(other, "hi") == fixed.replace("26 Jul 2024", "1 Jan 2030")
    template = "{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content }}"
    asked = PromptEncoder(load("llama3_2", {"chat_template": template}))
    assert decoded(asked, "hi") == "2024-07-26hi"


def test_plain_text_has_bos_where_the_tokenizer_writes_one(folders, load):
    for name in ("llama3_2", "gemma3", "qwen3", "smollm2"):
        theirs = AutoTokenizer.from_pretrained(folders[name])
        options = {"chat": False, "system_prompt": "Add.", "prefill": " So"}
        assert (
            PromptEncoder(load(name), **options)("1+1?") == theirs("Add.\n\n1+1? So")["input_ids"]
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_text_survives_and_unknown_ids_have_one(folders, load, name):
    tokenizer = load(name)
    for text in [*QUESTIONS, " do n't , ' s .", "<think>\n1 </think>", *tokenizer.special_tokens]:
        ids = tokenizer.encode(text, add_bos=False, add_eos=False)
        assert decode_tokens(tokenizer, ids) == text
    theirs = AutoTokenizer.from_pretrained(folders[name])
    assert tokenizer.vocab_size == len(theirs)
    a, b = (tokenizer.encode(text, False, False) for text in "ab")
    beyond = [len(theirs), len(theirs) + 1, 10**6]
    assert decode_tokens(tokenizer, [*a, *beyond, *b, beyond[0]]) == "a\ufffd\ufffd\ufffdb\ufffd"
    end = [tokenizer.eos_id]
    assert tokenizer.encode("a")[-1:] == end and decode_tokens(tokenizer, end) != ""
    assert tokenizer.decode([*a, *end]) == "a"


def test_stop_tokens_are_those_of_the_folder(load, tmp_path):
    tokenizer = load("gemma3")
    own, turn_end = tokenizer.eos_id, tokenizer.special_tokens["<end_of_turn>"]
    for settings, expected in [
        ({}, [own]),
        ({"config.json": {"eos_token_id": 7}}, [7, own]),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {}}, [7, own]),
        ({"generation_config.json": {"eos_token_id": [3, own]}}, [3, own]),
        ({"generation_config.json": {"eos_token_id": 9}, "config.json": {"eos_token_id": 7}}, [9]),
    ]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_tokenizer(folder, "gemma3")
        for name, content in settings.items():
            (folder / name).write_text(json.dumps(content))
        assert hf_tokenizer(str(folder)).stop_tokens == sorted({*expected, own, turn_end})


def test_what_ends_a_turn_of_the_template_ends_a_response(tmp_path):
    """Llama 3.2's tokenizer alone may name <|end_of_text|>, with which no reply ends."""
    for name, eos, turn_end in [
        ("llama3_2", "<|end_of_text|>", "<|eot_id|>"),
        ("qwen3", "<|endoftext|>", "<|im_end|>"),
        ("gemma3", "<eos>", "<end_of_turn>"),
    ]:
        file = write_tokenizer(tmp_path / name, name) / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": eos}))
        tokenizer = hf_tokenizer(str(tmp_path / name))
        ends = {tokenizer.special_tokens[text] for text in (eos, turn_end)}
        assert {*tokenizer.stop_tokens} == ends


def test_a_config_makes_one_without_a_word(folders, capfd):
    node = {"_component_": "torchtune_grpo.models.hf_tokenizer", "model_dir": str(folders["qwen3"])}
    node["chat_template_kwargs"] = {"enable_thinking": False}
    tokenizer = instantiate("tokenizer", OmegaConf.create(node))
    assert decoded(PromptEncoder(tokenizer), "word " * 3000).endswith("</think>\n\n")
    assert capfd.readouterr() == ("", "")


def test_what_is_wrong_is_named(folders, tmp_path):
    def refused(folder, message, **kwargs):
        with pytest.raises(ValueError, match=message):
            hf_tokenizer(str(folder), **kwargs)

    refused(tmp_path / "none", "^model_dir=.*none: no such folder; `tune download")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused(tmp_path, "^model_dir=.*: has no tokenizer .*tokenizer.json.*Copy")
    (tmp_path / "tokenizer.json").write_text("{")
    refused(tmp_path, "^model_dir=.*: could not read its tokenizer: ")
    named = write_tokenizer(tmp_path / "named", "qwen3", has_template=False)
    settings = json.loads((named / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": n, "template": n} for n in ("rag", "tool_use")]
    (named / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(named, "^model_dir=.*: has the chat templates rag, tool_use.*{chat_template: rag}")
    for name in ("enable_thinkng", "add_generation_prompt", "tokenize"):
        message = f"^chat_template_kwargs.{name}: the chat template has no such variable to set"
        refused(folders["qwen3"], message, chat_template_kwargs={name: False})


def test_chat_formats_that_do_not_fit_are_named(load, tmp_path):
    base = hf_tokenizer(str(write_tokenizer(tmp_path / "base", "qwen3", has_template=False)))
    assert PromptEncoder(base, chat=False)("1+1?") == base.encode("1+1?", add_eos=False)
    with pytest.raises(ValueError, match="^chat=True: .*base has no chat template.*chat=False"):
        PromptEncoder(base)
    gemma = load("gemma")
    with pytest.raises(ValueError, match="^system_prompt: .*System role not supp.*prompt_template"):
        PromptEncoder(gemma, system_prompt="Be brief.")
    with pytest.raises(ValueError, match="the chat format refuses it: .*must alternate"):
        PromptEncoder(gemma)([{"role": "user", "content": "a"}] * 2)
    parts = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}A:"  # not of a text
    with pytest.raises(ValueError, match="^chat=True: .*leaves out the prompt: 'A:'"):
        PromptEncoder(load("qwen3", {"chat_template": parts}))
    with pytest.raises(ValueError, match="the prompt is longer than tokenizer.max_seq_len=5"):
        RLDataset(load("qwen3", {}, 5), rows=[{"prompt": "a question of more than five tokens"}])
    silent = load("qwen3", {"chat_template": "{{ messages[-1].content }}"})
    with pytest.raises(ValueError, match="^system_prompt: .*leaves it out"):
        PromptEncoder(silent, system_prompt="Be brief.")
