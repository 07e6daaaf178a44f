"""What stands between two turns, and calls as the models write them: equal to TRL's."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from hf_tokenizers import write_tokenizer
from transformers import AutoTokenizer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
)
from trl.trainer.grpo_trainer import GRPOTrainer

from torchtune_grpo.environments.calls import MALFORMED, find_parser, read_turn
from torchtune_grpo.environments.replies import ReplyEncoder
from torchtune_grpo.models import hf_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ENDS = {"qwen3": "<|im_end|>", "qwen2_5": "<|im_end|>", "llama3_2": "<|eot_id|>"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
TURNS = {
    "qwen3": [
        f"<think>\nhm\n</think>\n\nLet me see. {CALL}",
        f"{CALL}\n{CALL}",
        "<think>\nhm\n</think>\n\nIt is 3.",
        "It is 3.",
        '<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "other", "arguments": {"a": "1"}}</tool_call>',
    ],
    "llama3_2": [
        '{"name": "add", "parameters": {"a": 1, "b": [2]}}',
        'So: {"name": "add", "parameters": {"a": "1"}}',
        "It is 3.",
    ],
}


def schema(name, **types):
    """The schema of a tool with these parameters."""
    parameters = {"type": "object", "properties": types}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = schema("add", a={"type": "integer"}, b={"type": "array", "items": {"type": "integer"}})
TYPES = [{"type": t} for t in ("integer", "number", "boolean", "array", "object", "string")]
TYPES += [{"type": "integer", "nullable": True}, {"type": ["boolean", "integer"]}, {}]
TYPES += [{"anyOf": [{"type": "null"}, {"oneOf": [{"type": "number"}]}]}]
KINDS = schema("kinds", **dict(zip("abcdefghij", TYPES, strict=True)))


@pytest.fixture(params=["qwen3", "qwen2_5", "llama3_2"])
def model(request, tmp_path):
    folder = write_tokenizer(tmp_path, request.param)
    return request.param, hf_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


def parser_of(tokenizer):
    return find_parser(lambda turns: tokenizer.chat_text(turns, add_generation_prompt=False))


def with_template(template, folder):
    """How one of TRL's templates writes messages."""
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(folder, "qwen3"))
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return lambda turns: tokenizer.apply_chat_template(turns, tokenize=False)


def calls_of(*given):
    return [{"type": "function", "function": {"name": "at", "arguments": of}} for of in given]


def test_turns_are_read_as_by_trl(model):
    name, ours, theirs = model
    parse = parser_of(ours)
    add_response_schema(theirs)
    asked = [{"role": "user", "content": "q"}]
    prompt = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    for text in TURNS.get(name, TURNS["qwen3"]):
        ids = theirs.encode(text + ENDS[name], add_special_tokens=False)
        expected = parse_response(theirs, ids, prefix=prompt, tools=[ADD])
        assert read_turn(text, parse, [ADD]) == expected


WRITTEN = ["7", " 7 ", "+7", "1_0", "3.0", "3.5", "1e2", "-inf", "nan", "true", "FALSE", "1"]
WRITTEN += ["null", "None", "[1, 2]", '{"a": [1]}', "[1", "", "seven", "0x7", 7, 2.5, True, None]


def test_arguments_get_the_types_of_their_schema_as_by_trl(model):
    """Models often write all arguments as texts; here all ten parameters get the same one."""
    name, ours, theirs = model
    parse = parser_of(ours)
    add_response_schema(theirs)
    for value in WRITTEN:
        key = "parameters" if name == "llama3_2" else "arguments"
        text = json.dumps({"name": "kinds", key: dict.fromkeys("abcdefghij", value)})
        text = text if name == "llama3_2" else f"<tool_call>{text}</tool_call>"
        ids = theirs.encode(text + ENDS[name], add_special_tokens=False)
        expected = parse_response(theirs, ids, prefix=[], tools=[KINDS])
        read = read_turn(text, parse, [KINDS])
        assert repr(read["tool_calls"]) == repr(expected["tool_calls"])  # 1 is not True


BAD = {  # a good call, one of no JSON, one whose arguments have no names
    "qwen3": f"So {CALL}\n"
    '<tool_call>{"name": "add", "argu</tool_call>'
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    "llama3_2": 'So {"name": "add", "parameters": {"a": 1, "b": [2]}}; '
    '{"name": "add", "parameters": {"a": 1; {"name": "add", "parameters": [1]}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_call_leaves_the_good_ones(name, tmp_path):
    parse = parser_of(hf_tokenizer(str(write_tokenizer(tmp_path, name))))
    turn = read_turn(BAD[name], parse, [ADD])
    assert turn["content"] == "So"
    read = [(call["function"]["arguments"], "error" in call) for call in turn["tool_calls"]]
    written = '{"name": "add", "argu' if name == "qwen3" else ' {"a": 1; '
    assert read == [({"a": 1, "b": [2]}, False), (written, True), ([1], True)]


def test_an_argument_may_hold_the_tag_that_closes_a_call(tmp_path):
    parse = parser_of(hf_tokenizer(str(write_tokenizer(tmp_path, "qwen3"))))
    tags = "</tool_call> <tool_call>{</tool_call>"
    call = json.dumps({"name": "add", "arguments": {"a": tags}})
    turn = read_turn(f"So <tool_call>\n{call}\n</tool_call>\n{CALL} on", parse, [ADD])
    arguments = [each["function"]["arguments"] for each in turn["tool_calls"]]
    assert arguments == [{"a": tags}, {"a": 1, "b": [2]}] and turn["content"] == "So on"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', {"a": 1}),
        ('<|python_tag|>{"type": "function", "name": "add", "parameters": null}', {}),
        ('{"name": "Ada", "parameters": {"a": 1}}', None),
        ('The user is {"name": "Ada"}.', None),
        ('{"name": "add"}', None),
    ],
)
def test_a_call_of_llama_has_a_tools_name_and_its_arguments(text, arguments, tmp_path):
    parse = parser_of(hf_tokenizer(str(write_tokenizer(tmp_path, "llama3_2"))))
    turn = read_turn(text, parse, [ADD])
    found = [call["function"]["arguments"] for call in turn.get("tool_calls", ())]
    assert found == ([] if arguments is None else [arguments])
    assert turn["content"] == ("" if found else text)


def test_results_have_the_tokens_of_trl(model):
    _, ours, theirs = model
    keeps = is_chat_template_prefix_preserving(theirs)
    trainer = SimpleNamespace(
        _is_vlm=False,
        _tokenizer=theirs,
        processing_class=theirs,
        chat_template=None if keeps else get_training_chat_template(theirs),
        chat_template_kwargs={},
    )
    encode = ReplyEncoder(ours, roles=["tool"])
    results = [("add", '3 {"a": "b"}\n'), ("unknown", "ü")]
    turns = [{"role": "tool", "name": name, "content": text} for name, text in results]
    assert encode(turns) == GRPOTrainer._get_tool_suffix_ids(trainer, turns)
    ended_otherwise = encode(turns, ended=False)  # as by a stop string
    assert ended_otherwise == [ours.stop_tokens[0], *encode(turns)]


USER_MESSAGES = {  # the end of a turn, and what stands before the next
    "qwen2_5": ("<|im_end|>", "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
    "llama3_2": (
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma3": ("<end_of_turn>", "\n<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"),
}


@pytest.mark.parametrize("name", USER_MESSAGES)
def test_a_user_message_is_between_turns_as_the_template_writes_it(name, tmp_path):
    end, expected = USER_MESSAGES[name]
    tokenizer = hf_tokenizer(str(write_tokenizer(tmp_path, name)))
    encode, turns = ReplyEncoder(tokenizer, roles=["user"]), [{"role": "user", "content": "c"}]
    for ended, text in ((True, expected), (False, end + expected)):
        tokens = encode(turns, ended=ended)
        assert tokens == tokenizer.encode(text, add_bos=False, add_eos=False)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text


TAKEN = [(name, role) for name in ("qwen2_5", "llama3_2") for role in ("tool", "user")]


@pytest.mark.parametrize("name, role", [*TAKEN, ("gemma3", "user")])
def test_special_tokens_in_a_result_are_text(name, role, tmp_path):
    tokenizer = hf_tokenizer(str(write_tokenizer(tmp_path, name)))
    encode = ReplyEncoder(tokenizer, roles=[role])

    def reply(text):
        turn = {"role": role, "content": text} | ({"name": "find"} if role == "tool" else {})
        return encode([turn])

    names = [text for text in tokenizer.added_tokens if text != tokenizer.CUT]
    special = {tokenizer.encode(text, add_bos=False, add_eos=False)[0] for text in names}
    hostile = "".join(names) + tokenizer.CUT
    counts = [sum(token in special for token in reply(text)) for text in (hostile, "x")]
    assert counts[0] == counts[1]
    text = tokenizer.decode(reply(hostile), skip_special_tokens=False)
    assert all(name in text for name in names)
    assert not special & {*encode.inline(hostile)}


def test_gemma_writes_arguments_without_quotes(tmp_path):
    render = with_template("gemma4", tmp_path)
    calls = calls_of({"city": 'Rio "{a:1}"', "days": 3, "deep": {"x": [True, "b"]}})
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = render([{"role": "user", "content": "q"}, turn]).rpartition("model\n")[2]
    assert read_turn(text.removesuffix("<|tool_response>"), find_parser(render), []) == turn


def test_calls_in_python_are_read_as_lfm_writes_them(tmp_path):
    render = with_template("lfm2_v2", tmp_path)
    calls = calls_of({"city": "Rio's\n[b(a=1)]", "days": 3, "deep": {"x": [True, None, "b"]}}, {})
    turn, parse = {"role": "assistant", "content": "So", "tool_calls": calls}, find_parser(render)
    text = render([{"role": "user", "content": "q"}, turn]).rpartition("assistant\n")[2]
    assert read_turn(text.removesuffix("<|im_end|>\n"), parse, []) == turn
    bad = ["at(1)", "[at(1)]", "[at(a=b)]", "[at(**{})]", "at", "[at(a=1)", "[" * 9999]
    for text in (*bad, '[at(a={{"x": 1}})]', "[at(a={[1]: 2})]"):
        (call,) = read_turn(f"<|tool_call_start|>{text}<|tool_call_end|>", parse, [])["tool_calls"]
        assert call["error"] == MALFORMED and call["function"]["arguments"] == text


@pytest.mark.parametrize("template", ["qwen3_6", "nemotron_3_nano", "glm4moe"])
def test_calls_with_tags_are_read_as_the_template_writes_them(template, tmp_path):
    """Of several calls in a turn; texts keep their lines, and other values get their types."""
    render = with_template(template, tmp_path)
    calls = calls_of({"city": "Rio\n <b>", "days": 3, "deep": {"x": [True, "b"]}}, {"city": "</p>"})
    types = {"city": "string", "days": "integer", "deep": "object"}
    tools = [schema("at", **{name: {"type": kind} for name, kind in types.items()})]
    turn = {"role": "assistant", "content": "So", "tool_calls": calls}
    text = render([{"role": "user", "content": "q"}, turn])
    text = text[text.rindex("So") :].removesuffix("\n").removesuffix("<|im_end|>")
    parse = find_parser(render)
    assert read_turn(text, parse, tools) == turn
    cut = text.replace("</parameter>", "", 1).replace("</arg_value>", "", 1)
    first, second = read_turn(cut, parse, tools)["tool_calls"]
    assert "error" in first and second == calls[1]
    unread = "So <tool_call>\n"
    assert read_turn(unread, parse, tools) == {"role": "assistant", "content": unread}


@pytest.mark.parametrize("template", ["gptoss", "phi3"])
def test_other_forms_of_calls_are_refused(template, tmp_path):
    with pytest.raises(ValueError, match="writes no calls in a form that is read. Train a model"):
        find_parser(with_template(template, tmp_path))


@pytest.mark.parametrize("role, options", [("user", {}), ("tool", {"enable_thinking": False})])
def test_a_template_that_drops_earlier_thinking_is_refused(role, options, tmp_path):
    folder = str(write_tokenizer(tmp_path, "qwen3"))
    with pytest.raises(ValueError, match="drops a part of earlier turns.*chat_template.jinja"):
        ReplyEncoder(hf_tokenizer(folder, options), roles=[role])
    keeps = {"chat_template": (TEMPLATES / "qwen3_training.jinja").read_text()}
    ReplyEncoder(hf_tokenizer(folder, options | keeps), roles=[role])
