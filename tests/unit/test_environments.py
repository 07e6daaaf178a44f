"""Conversations with tools and environments, as TRL plays them; and what a bad one costs."""

import copy
import pickle
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from conversations import END, ScriptedEngine, call, play
from hf_tokenizers import write_tokenizer
from omegaconf import OmegaConf
from played import (
    EchoEnv,
    GuessGym,
    GuessMapping,
    GuessObject,
    GuessTuple,
    WordleEnv,
    async_add,
    find,
    multiply,
)
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response
from trl.trainer.grpo_trainer import GRPOTrainer

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import EnvironmentConfig
from torchtune_grpo.config.text import ConfigError
from torchtune_grpo.data import RLDataset
from torchtune_grpo.data.chat import PromptEncoder
from torchtune_grpo.environments.calls import MALFORMED
from torchtune_grpo.environments.conversations import conversation_metrics
from torchtune_grpo.environments.environment import (
    Environment,
    environment_rewards,
    make_environment,
)
from torchtune_grpo.environments.examples import GuessNumber
from torchtune_grpo.environments.kinds import make_kinds
from torchtune_grpo.environments.replies import ReplyEncoder
from torchtune_grpo.evaluation import evaluator
from torchtune_grpo.models import hf_tokenizer
from torchtune_grpo.rewards import Reward, RewardSet
from torchtune_grpo.trajectory import Completion


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return hf_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen3")))


# --- TRL's own examples, from its documentation, unmodified -----------------------------------


def test_trl_tools(qwen):
    calls = call("multiply", a=6, b=7) + call("async_add", a=1, b=2)
    rows, _ = play(qwen, [[calls + END, "It is 42." + END]], tools=[multiply, async_add])
    (talk,) = rows.completions
    results = [turn["content"] for turn in talk.messages if turn["role"] == "tool"]
    assert (results, talk.text, talk.ended) == (["42", "3"], "It is 42.", "answered")
    assert "Multiplies two integers." in qwen.decode(rows.tokens[0].tolist())


def test_a_malformed_call_gets_an_error_beside_the_results_of_good_ones(qwen):
    good, bad = call("multiply", a="6", b=7), '<tool_call>\n{"name": "mul</tool_call>'
    script = [good + bad + good + END, bad + END, "Done." + END]
    rows, _ = play(qwen, [script], tools=[multiply], max_turns=3)
    (talk,) = rows.completions
    replies = [turn["content"] for turn in talk.messages if turn["role"] == "tool"]
    error = str({"error": MALFORMED})
    assert replies == ["42", error, "42", error] and talk.ended == "answered"
    assert conversation_metrics([talk])["tools/failure_frequency"] == [1, 1, 0, 0]
    encode = ReplyEncoder(qwen, roles=["tool"])
    between = [talk.messages[1:4], talk.messages[5:6]]
    said = [good + bad + good + "<|im_end|>", bad + "<|im_end|>", "Done.<|im_end|>"]
    expected = [qwen.encode(text, add_bos=False, add_eos=False) for text in said]
    expected = expected[0] + encode(between[0]) + expected[1] + encode(between[1]) + expected[2]
    assert rows.response_ids == [expected]


def test_results_are_written_as_python_writes_them(qwen):
    """As a search or a database returns them; only what chat templates know as parts is joined."""
    names = ["rows", "kinds", "none", "parts", "picture", "nothing", "huge", "exit"]
    scripts = [[call("find", what=name) + END, "." + END] for name in names]
    rows, _ = play(qwen, scripts, tools=[find])
    ends = [talk.ended for talk in rows.completions]
    assert ends == ["answered"] * 6 + ["context", "tool_failed"]
    *written, parts, picture, error = [talk.messages[1]["content"] for talk in rows.completions[:6]]
    assert written == [str(find(name)) for name in names[:3]] and written[2] == "[]"
    assert parts == "a?\x00" and "only text models" in picture
    assert error == str({"error": "'nothing'"})


def test_trl_environment_whose_reset_adds_to_the_prompt(qwen):
    def reward_func(environments, **kwargs):
        return [environment.reward for environment in environments]

    data = [{"prompt": [{"role": "user", "content": "Play."}], "secret": "crane"}]
    stare, crane = (call("guess", guess=f"[{word}]") + END for word in ("stare", "crane"))
    scripts = [[stare, crane, "Yes" + END], [stare, call("guess", word="x") + END, "No" + END]]
    rewards = [Reward("reward_func", reward_func)]
    rows, scores = play(qwen, scripts, rows=data, objects={None: WordleEnv}, rewards=rewards)
    assert scores.of("reward_func").tolist() == [1, 0]
    text = qwen.decode(rows.tokens[0].tolist(), skip_special_tokens=False)
    assert "Play. Guess the word.<|im_end|>" in text
    assert rows.prompts[0].text == "Play. Guess the word."
    error = rows.completions[1].messages[3]["content"]
    assert error.startswith("{'error': \"") and "unexpected keyword argument 'word'" in error


def test_trl_environments_by_name_with_rewards_of_their_own(qwen):
    prompt = [{"role": "user", "content": "Hi"}]
    data = [
        {"prompt": prompt, "environment": "echo", "secret": ""},
        {"prompt": prompt, "environment": "wordle", "secret": "crane"},
    ]
    scripts = [[call("echo", message=text) + END, "." + END] for text in ("hello", "x")]
    rows, scores = play(qwen, scripts, rows=data, objects={"echo": EchoEnv, "wordle": WordleEnv})
    echo = scores.of("EchoEnv").tolist()
    assert echo[0] == pytest.approx(0.5) and echo[1] != echo[1]  # NaN: it is not of this one
    texts = [qwen.decode(row, skip_special_tokens=False) for row in rows.tokens.tolist()]
    assert ['"name": "echo"' in text.partition("user\nHi")[0] for text in texts] == [True, False]
    assert rows.completions[1].messages[1]["content"] == "{'error': 'Tool echo not found.'}"


# --- Tokens and masks -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "llama3_2"])
def test_tokens_and_masks_are_those_of_trl(name, tmp_path):
    folder = str(write_tokenizer(tmp_path, name))
    ours, theirs = hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    first = call("multiply", a="6", b=7)
    second = "<think>\nhm\n</think>\n\n" + call("multiply", a=1)
    if name == "llama3_2":
        first = '{"name": "multiply", "parameters": {"a": "6", "b": 7}}'
        second = '{"name": "multiply", "parameters": {"a": 1}}'
    script = [first + END, second + END, "42" + END]
    rows, _ = play(ours, [script], tools=[multiply])

    add_response_schema(theirs)
    chat_template = get_training_chat_template(theirs) if name == "qwen3" else None
    end = "<|im_end|>" if name == "qwen3" else "<|eot_id|>"
    said = [theirs.encode(t.replace(END, end), add_special_tokens=False) for t in script]
    prompt = [{"role": "user", "content": "Hi"}]
    prompt_ids = theirs.apply_chat_template(
        prompt,
        tools=[multiply],
        chat_template=chat_template,
        add_generation_prompt=True,
        date_string="26 Jul 2024",
    )["input_ids"]
    left = copy.deepcopy(said)
    trainer = SimpleNamespace(
        max_tool_calling_iterations=10,
        max_completion_length=5000,
        use_vllm=False,
        _is_vlm=False,
        _tokenizer=theirs,
        processing_class=theirs,
        chat_template=chat_template,
        chat_template_kwargs={},
        environment_factories=None,
        tools=[multiply],
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=9000)),
        _sync_tool_dicts=[{"multiply": multiply}],
        _async_tool_dicts=[{}],
        _generate_single_turn=lambda *args, **kwargs: ([left.pop(0)], None),
    )
    trainer._get_tool_suffix_ids = lambda turns: GRPOTrainer._get_tool_suffix_ids(trainer, turns)
    begun = left.pop(0)
    completions = [[parse_response(theirs, begun, prefix=prompt_ids, tools=[multiply])]]
    mask, messages, ids, *_ = GRPOTrainer._tool_call_loop(
        trainer, [prompt], [prompt_ids], [begun], completions, None, None, {}
    )
    assert rows.tokens[0].tolist() == prompt_ids + ids[0]
    assert rows.response_mask[0].long().tolist() == mask[0]
    assert rows.completions[0].messages == messages[0]


# --- step(text) -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GuessTuple, GuessGym, GuessObject, GuessMapping])
def test_forms_of_step(kind, tmp_path):
    tokenizer = hf_tokenizer(str(write_tokenizer(tmp_path, "smollm2")))
    scripts = [["5" + END, "7" + END], ["5" + END, "6" + END]]
    data = [{"prompt": "Guess.", "secret": 7}]
    rows, scores = play(tokenizer, scripts, rows=data, objects={None: kind}, max_turns=2)
    assert scores.of(kind.__name__).tolist() == [1, 0]
    assert [talk.ended for talk in rows.completions] == ["done", "max_turns"]
    response = rows.tokens[0, rows.prompt_lengths[0] :][: rows.response_lengths[0]]
    both = (response.tolist(), rows.completion_ids[0])
    whole, said = (tokenizer.decode(ids, skip_special_tokens=False) for ids in both)
    between = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert (whole, said) == (f"5<|im_end|>{between}7<|im_end|>", "5<|im_end|>7<|im_end|>")


def test_calls_that_are_made_are_counted_where_there_are_tools(qwen, tmp_path):
    prompt = [{"role": "user", "content": "Hi"}]
    rows, _ = play(
        hf_tokenizer(str(write_tokenizer(tmp_path, "qwen2_5"))),
        [[call("echo", message="x") + END] * 3, ["6" + END] * 2 + ["7" + END]],
        rows=[{"prompt": prompt, "environment": name, "secret": 7} for name in ("echo", "guess")],
        objects={"echo": EchoEnv, "guess": GuessTuple},
        max_turns=3,
    )
    assert [talk.ended for talk in rows.completions] == ["max_turns", "done"]
    for talks, called in ((rows.completions, [2]), (rows.completions[1:], [])):
        found = conversation_metrics(talks)
        assert found["tools/call_frequency"] == called
        assert found["tools/failure_frequency"] == [0] * sum(called)
        assert found["environment/turns"] == [3] * len(talks)


def test_a_row_without_tools_is_told_of_none(tmp_path):
    """Llama's template writes how to call functions even for an empty list of them."""
    llama = hf_tokenizer(str(write_tokenizer(tmp_path, "llama3_2")))
    prompt = [{"role": "user", "content": "Hi"}]
    data = [{"prompt": prompt, "environment": "guess", "secret": 7}]
    objects = {"echo": EchoEnv, "guess": GuessTuple}
    rows, _ = play(llama, [["7" + END]], rows=data, objects=objects)
    assert rows.tokens[0, : rows.prompt_lengths[0]].tolist() == PromptEncoder(llama)(prompt)


def test_other_ranks_get_a_conversation_without_its_environment():
    talk = Completion("a", [], "done", kind="K", environment=threading.Lock(), reward=0.5, turns=2)
    assert pickle.loads(pickle.dumps(talk)) == replace(talk, environment=None)


# --- Side by side, and what a bad one costs ---------------------------------------------------


def test_an_evaluation_has_only_so_many_processes_at_once(tmp_path, monkeypatch):
    tokenizer = hf_tokenizer(str(write_tokenizer(tmp_path, "smollm2")))
    monkeypatch.setattr(evaluator, "_MOST_SESSIONS", 4)
    game = "environment._component_=torchtune_grpo.environments.examples.GuessNumber"
    changes = [game, "rewards=[]", "evaluation.samples=2"]
    cfg = read_config(load_config("tiny_arithmetic_grpo", changes))
    kinds = make_kinds(cfg.environment, [])
    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "answer": n} for n in "787"]
    data = RLDataset(tokenizer, rows=rows)
    parts = {"tokenizer": tokenizer, "context": 8000}
    environment = make_environment(kinds, cfg.environment, encoder=data.encoder, **parts)
    parts = {"rewards": RewardSet.from_config(environment_rewards(kinds)), "tokenizer": tokenizer}
    measure = evaluator.Evaluator(cfg, data, environment=environment, **parts)
    engine = ScriptedEngine(tokenizer, [["7" + END, "8" + END]] * 4)
    found = measure(engine).answered
    assert [request.num_rows for request in engine.asked] == [3, 4, 2]
    scores = [[each.scores["GuessNumber"] for each in asked.samples] for asked in found]
    assert scores == [[1, 1], pytest.approx([0.9, 0.9]), [1, 1]]
    assert len(kinds[None].idle) == 4
    kinds[None].close()


def test_limits_end_a_conversation(qwen):
    again = call("multiply", a=2, b=2) + END
    size = len(qwen.encode(again.replace(END, ""), add_bos=False, add_eos=False)) + 1
    short, talks = {"max_tokens": 2 * size}, [[again] * 9]
    rows, _ = play(qwen, talks, tools=[multiply], max_response_tokens=9000 // 2, **short)
    (talk,) = rows.completions
    assert (talk.ended, talk.turns, bool(rows.truncated[0])) == ("max_tokens", 2, False)
    rows, _ = play(qwen, talks, tools=[multiply], max_response_tokens=2 * size, max_tokens=2 * size)
    (talk,) = rows.completions
    assert (talk.ended, talk.turns, bool(rows.truncated[0])) == ("context", 2, True)
    assert [turn["role"] for turn in talk.messages] == ["assistant", "tool", "assistant"]
    reply = [{"role": "tool", "name": "multiply", "content": "4"}]
    length = size + len(ReplyEncoder(qwen, roles=["tool"])(reply))
    for limit, turns in ((length, 1), (length + 1, 2)):  # a token has to be left for the policy
        rows, _ = play(qwen, talks, tools=[multiply], max_response_tokens=limit)
        assert (rows.completions[0].ended, rows.completions[0].turns) == ("context", turns)
    rows, _ = play(qwen, talks, tools=[multiply], max_turns=3)
    (talk,) = rows.completions
    assert (talk.ended, talk.turns) == ("max_turns", 3)
    rows, _ = play(qwen, [["So so" + END]], tools=[multiply], max_tokens=2)
    assert (rows.completions[0].ended, rows.truncated.tolist()) == ("max_tokens", [True])


# --- Mistakes, before a model is loaded -------------------------------------------------------


def test_a_server_of_one_session_is_refused_at_the_start(qwen, tmp_path):
    settings = EnvironmentConfig(_component_="played.OneAtATime", folder=str(tmp_path))
    kinds = make_kinds(settings, [])
    encoder = PromptEncoder(qwen)
    environment = Environment(kinds, settings, encoder, ReplyEncoder(qwen, roles=()), None, 100)
    with pytest.raises(ValueError, match="a second session.*CAPACITY_REACHED.*max_concurrent_envs"):
        environment.check_sessions({}, encoder.prompt("Hi"))
    assert not [*tmp_path.iterdir()]


class NoReset:
    def step(self, text):
        return "", 0.0, True


class NoTools:
    def reset(self, **row):
        return None


class NoHints(NoTools):
    def look(self, where):
        """Looks."""


def no_docstring(a: int) -> int:
    return a


class StaticTool(NoTools):
    multiply = staticmethod(multiply)


def test_a_tool_may_be_a_static_method():
    keys = EnvironmentConfig(_component_="my.StaticTool")
    (kind,) = make_kinds(keys, [], {"environment": StaticTool}).values()
    assert kind.schemas == [get_json_schema(multiply)]


@pytest.mark.parametrize(
    ("environment", "tools", "said"),
    [
        (NoReset, [], "has no method reset"),
        (NoTools, [], "neither step.text. nor a public method"),
        (NoHints, [], r"NoHints.look: a tool needs type hints"),
        (GuessTuple, [multiply], "tools: .* has step"),
        (None, [no_docstring], r"tools\[0\]: a tool needs type hints"),
        (None, [partial(multiply, b=2)], r"tools\[0\]: a tool needs .* is not a .* function"),
    ],
)
def test_what_an_environment_lacks_is_said(environment, tools, said):
    keys = {} if environment is None else {"_component_": f"my.{environment.__name__}"}
    objects = {"environment": environment} | {f"tools.{n}": tool for n, tool in enumerate(tools)}
    with pytest.raises(ConfigError, match=said):
        make_kinds(EnvironmentConfig(**keys), [f"my.tool_{n}" for n in range(len(tools))], objects)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_trns": 3}, "environment.max_trns=3: unknown key.*mean environment.max_turns"),
        ({"_component_": "no.such.Class"}, "environment._component_=no.such.Class: cannot be imp"),
        ({"_component_": "hosted.Bad", "speed": 1}, "environment.speed=1: host"),
        ({"_component_": "hosted.Bad", "max_turn": 1}, "environment.max_turns"),
    ],
)
def test_mistakes_in_the_node_are_said(keys, said):
    with pytest.raises(ConfigError, match=said):
        make_kinds(EnvironmentConfig(**keys), [])


# --- The shipped environments ---------------------------------------------------------------


def test_the_calculator_of_the_shipped_config(qwen):
    cfg = load_config("smollm2_calculator_grpo")
    prompt = cfg.dataset.prompt_template.replace("{prompt}", "What is 312 * 405?")
    assert cfg.sampling.stop_strings[0] == ")" and cfg.dataset.chat is False
    scripts = [
        ["\ncalc(312 * 405)", " The answer is 126360.\n\n"],
        ["\ncalc(312, 405)", " The answer is 717.\n\n"],
        ["\nThe answer is 12636." + END],
    ]
    data, settings = [{"prompt": prompt, "answer": "126360"}], OmegaConf.to_object(cfg.environment)
    rows, scores = play(qwen, scripts, rows=data, chat=False, **settings)
    assert scores.of("Calculator").tolist() == [1, 0, 0]
    assert rows.completions[0].text == "\ncalc(312 * 405) = 126360. The answer is 126360.\n\n"
    assert qwen.decode(rows.completion_ids[0]) == "\ncalc(312 * 405) The answer is 126360.\n\n"
    assert " = ?" in rows.completions[1].text


def test_the_game_of_guessing(tmp_path):
    tokenizer = hf_tokenizer(str(write_tokenizer(tmp_path, "smollm2")))
    scripts = [["5" + END, "7" + END], ["7" + END], ["?" + END], ["9" + END] * 9]
    data = [{"prompt": "Guess.", "answer": "7"}]
    rows, scores = play(tokenizer, scripts, rows=data, objects={None: GuessNumber}, max_turns=5)
    assert scores.of("GuessNumber").tolist() == pytest.approx([0.9, 1, 0, 0])
    assert [talk.ended for talk in rows.completions] == ["done", "done", "done", "max_turns"]
    assert rows.completions[0].messages[1]["content"] == "higher"
