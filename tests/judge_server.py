"""A judge behind a real HTTP server, which may fail in every way that servers have."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GARBAGE = {
    "html": "<html>Bad gateway</html>",
    "empty": "",
    "error": '{"error": "overloaded"}',
    "list": "[]",
    "bytes": "\udcff\udcfe",  # which are not UTF-8
}


def chat(content: object) -> str:
    """Return a reply as OpenAI's interface has it."""
    choices = [{"message": {"role": "assistant", "content": content}}]
    return json.dumps({"choices": choices, "usage": {"total_tokens": 7}})


def parts_of(request: dict) -> tuple[list[str], str]:
    """Return the answers that a judge sees between fences, and all that stands outside."""
    text = request["messages"][0]["content"]
    fence = re.search(r"lines <(.+?)>", " ".join(text.split()))[1]
    parts = re.split(rf"\n</?{fence}>\n", text)
    return parts[3::2], "".join(parts[::2])


class Handler(BaseHTTPRequestHandler):
    """Does what the server's ``decide`` makes of a request's answers.

    A word is a status, a way to fail, or else the reply's text: "503 drop 8" fails twice, then
    replies "8". The last word holds for all further requests.
    """

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answers, outside = parts_of(request)
        with self.server.counted:
            self.server.requests.append((self.path, self.headers["Authorization"], request))
            self.server.tries["|".join(answers)] += 1
            tried = self.server.tries["|".join(answers)]
        words = self.server.decide(answers, outside)
        words = words.split() if isinstance(words, str) else [words]
        with suppress(OSError):  # the client has given up
            self.act(words[min(tried, len(words)) - 1])

    def act(self, word: object) -> None:
        status, _, seconds = str(word).partition(":")
        if word == "hang":
            self.connection.settimeout(60)
            self.connection.recv(1)  # until the client gives up
        elif word == "drip":  # each byte comes in time, and all of them do not
            self.reply(200, "", missing=1000)
            while not self.server.is_over.wait(0.05):
                self.wfile.write(b" ")
        elif word == "half":
            self.reply(200, chat("8"), missing=5)
        elif status in ("429", "500", "503", "400", "401"):
            said = json.dumps({"error": f"as asked by {self.headers['Authorization']}"})
            self.reply(int(status), said, after=seconds)
        elif word != "drop":
            self.reply(200, GARBAGE.get(word, chat(word)))

    def reply(self, code: int, text: str, missing: int = 0, after: str = "") -> None:
        body = text.encode(errors="surrogateescape")
        self.send_response(code)
        if after:
            self.send_header("Retry-After", after)
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class Judge(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def __init__(self, decide: Callable[[list[str], str], object]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.decide = f"http://127.0.0.1:{self.server_port}/v1", decide
        self.counted, self.is_over = threading.Lock(), threading.Event()
        self.requests, self.tries = [], Counter()


@contextmanager
def judge_server(decide: Callable[[list[str], str], object]) -> Iterator[Judge]:
    with Judge(decide) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()
