"""The judge of docs/rewards.md, as it stands on the page, against a server that misbehaves."""

import json
import math
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from test_docs_rewards import block

from torchtune_grpo.rewards import RewardFailure, RewardSet


def chat(content):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


GARBAGE = {
    "prose": chat("I would give it an 8 or a 9."),
    "eleven": chat("11"),
    "minus": chat("5 - 3"),
    "null": chat(None),
    "html": "<html>Bad gateway</html>",
    "empty": "",
    "error": '{"error": "overloaded"}',
    "list": "[]",
    "bytes": "\udcff\udcfe",  # which are not UTF-8
}


class Handler(BaseHTTPRequestHandler):
    """Does what the answer that it is to grade says: "503 drop 8" fails twice, then gives an 8.

    The last word holds for all further requests.
    """

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = request["messages"][0]["content"].rpartition("Answer:\n")[2]
        words = answer.split()
        with self.server.lock:
            self.server.requests.append((self.path, self.headers["Authorization"], request))
            self.server.tries[answer] += 1
            tried = self.server.tries[answer]
        self.act(words[min(tried, len(words)) - 1])

    def act(self, word):
        if word == "hang":
            self.connection.settimeout(60)
            self.connection.recv(1)  # until the client gives up
        elif word == "half":
            self.reply(200, chat("8"), missing=5)
        elif word in ("429", "500", "503", "400", "401"):
            self.reply(int(word), '{"error": "as asked"}')
        elif word != "drop":
            self.reply(200, GARBAGE.get(word, chat(word)))

    def reply(self, code, text, missing=0):
        body = text.encode(errors="surrogateescape")
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Stub(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/chat/completions"
        self.lock = threading.Lock()
        self.requests, self.tries = [], Counter()

    def handle_error(self, request, client_address):
        pass  # a client that has given up


@pytest.fixture
def stub():
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def scores_of(stub, tmp_path, monkeypatch):
    """Score completions by the page's reward, config and all, whose server is the stub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("JUDGE_API_KEY", "sesame")
    source = block("judge", "python")
    assert source.startswith("# my_rewards.py\n") and len(source.splitlines()) <= 45
    (config,) = yaml.safe_load(block("judge", "yaml"))["rewards"]

    def score(*completions, prompts=None, share=0.0, **settings):
        (tmp_path / "my_rewards.py").write_text(source)
        sys.modules.pop("my_rewards", None)
        node = {**config, "url": stub.url, "timeout": 1.0, "tries": 3, "pause": 0.05, **settings}
        rewards = RewardSet.from_config([node], max_failure_share=share)
        prompts = prompts or ["Say how it is."] * len(completions)
        return rewards(prompts=prompts, completions=completions, columns={"id": [*completions]})

    yield score
    sys.modules.pop("my_rewards", None)


def listed(scores):
    return [None if math.isnan(value) else round(value, 3) for value in scores.of("judge").tolist()]


# The answer to grade -> its score and the number of requests, of three that are allowed.
ENDS = {
    "7": (0.7, 1),
    "0": (0.0, 1),
    "10": (1.0, 1),
    "**8**/10.": (None, 1),
    "**8/10**.": (0.8, 1),
    "429 6": (0.6, 2),
    "500 503 6": (0.6, 3),
    "429 429 429 6": (None, 3),
    "500": (None, 3),
    "hang": (None, 3),
    "hang 5": (0.5, 2),
    "hang hang 3": (0.3, 3),
    "drop hang 2": (0.2, 3),
    "drop": (None, 3),
    "drop half 4": (0.4, 3),
    "half": (None, 3),
    "503 hang drop 9": (None, 3),
    **{name: (None, 1) for name in GARBAGE},
}


@pytest.mark.slow
def test_scores_and_tries(stub, scores_of):
    """Each gets what its replies are worth, or a failure, whatever happens to the others."""
    scores = scores_of(*ENDS, share=0.9)
    assert dict(zip(ENDS, listed(scores))) == {answer: mark for answer, (mark, _) in ENDS.items()}
    assert stub.tries == {answer: tries for answer, (_, tries) in ENDS.items()}
    assert scores.failed[:, 0].tolist() == [mark is None for mark, _ in ENDS.values()]


def test_what_the_server_is_asked(stub, scores_of):
    """The model, the key, the question, and the answer without the thinking before it."""
    scores_of("<think>{x} 3</think>8", prompts=["How {y}?"])
    ((path, key, request),) = stub.requests
    assert (path, key) == ("/v1/chat/completions", "Bearer sesame")
    assert request["model"] == "Qwen/Qwen2.5-7B-Instruct" and request["max_tokens"] == 16
    (message,) = request["messages"]
    assert message["role"] == "user"
    assert message["content"].endswith("Question:\nHow {y}?\n\nAnswer:\n8")


@pytest.mark.parametrize("code", ["400", "401"])
def test_what_no_second_try_corrects_stops_the_run(stub, scores_of, code):
    with pytest.raises(RewardFailure, match=f"failed on 1 of 2 completions.* HTTP Error {code}"):
        scores_of("7", code)
    assert stub.tries[code] == 1
    assert listed(scores_of("7", code, share=0.5)) == [0.7, None]
