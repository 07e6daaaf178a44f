"""What goes to the hub: the model and its card, to a local server that speaks as the hub does."""

import base64
import json
import re
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants
from runs import RECIPE, tune

import torchtune_grpo
from torchtune_grpo.checkpoint.push import main

SECRET = "sk-0123456789abcdef"
REWARDS = """
def of_length(prompts, completions, api_key, **columns):
    return [float(sum(text.encode()) % 7) for text in completions]
"""
KEYS = """
output_dir=out num_steps=2 saving.every_n_steps=1 batch_size=2 grpo_samples=4
max_generated_tokens=12 evaluation.every_n_steps=null eval_dataset.num_samples=2
evaluation.samples=0 model=torchtune_grpo.models.lora_hf_model optimizer.lr=1e-2
""".split()
KEYS.append(f"rewards=[{{_component_: own.of_length, api_key: {SECRET}}}]")


class Hub(BaseHTTPRequestHandler):
    """Keeps what it is sent: repository -> file -> content, and whether it is private."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        answer = {"errors": [], "warnings": []}  # of validate-yaml
        if self.path == "/api/repos/create":
            made = json.loads(body)
            name = f"{made['organization']}/{made['name']}"
            is_private = made.get("private", made.get("visibility") == "private")
            self.server.private[name] = is_private
            answer = {"url": f"{self.server.url}/{name}"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer["files"] = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in files
            ]
        elif "/commit/" in self.path:
            name = re.search("/api/models/(.*)/commit/main", self.path)[1]
            lines = [json.loads(line)["value"] for line in body.splitlines()]
            self.server.repos[name] = {
                each["path"]: base64.b64decode(each["content"]) for each in lines[1:]
            }
            answer = {"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": "1"}
            answer["success"] = True
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.repos, server.private, server.tokens = {}, {}, set()
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def train(folder: Path, *more: str) -> None:
    (folder / "own.py").write_text(REWARDS)
    tune("run", RECIPE, "--config", "tiny_arithmetic_grpo", *KEYS, *more, cwd=folder)


@pytest.fixture
def push(tmp_path, hub, monkeypatch):
    """The command, for the run in ``tmp_path``."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")

    def push(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["push", str(tmp_path / "out"), *arguments])
        main()

    return push


@pytest.mark.slow
def test_a_runs_model_is_on_the_hub_and_nothing_else(tmp_path, hub, push, monkeypatch):
    base = shutil.copytree(
        Path(torchtune_grpo.__file__).with_name("tiny_llama"), tmp_path / "tiny_llama"
    )
    settings = json.loads((base / "config.json").read_text()) | {"_name_or_path": str(base)}
    (base / "config.json").write_text(json.dumps(settings))  # as transformers 4 wrote it
    train(tmp_path, "model_dir=tiny_llama")
    with monkeypatch.context() as without:
        without.setenv("HF_TOKEN", "")
        with pytest.raises(ValueError, match="me/tiny-grpo: run `hf auth login`, or set HF_TOKEN."):
            push("me/tiny-grpo")
    saved = tmp_path / "out/step_000002"
    push("me/tiny-grpo")
    sent = hub.repos["me/tiny-grpo"]
    assert {*sent} == {
        *("README.md", "config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
        *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
    }
    assert hub.private == {"me/tiny-grpo": True} and hub.tokens == {"Bearer hf_mine"}
    same = [name for name in sent if sent[name] == (saved / name).read_bytes()]
    assert {*sent} - {*same} == {"README.md", "config.json", "adapter/adapter_config.json"}
    for name, content in sent.items():
        for private in (str(tmp_path), SECRET, "step_0", "api_key"):
            assert private.encode() not in content, (name, private)
    card = sent["README.md"].decode()
    assert 'from_pretrained("me/tiny-grpo")' in card and "Base model: `tiny_llama`" in card
    assert "Held-out mean of of_length " in card and "run_config" not in card

    (tmp_path / "out/step_000001/model.safetensors").open("ab").write(b"x")
    push("me/open", "--public")
    assert hub.private["me/open"] is False and {*hub.repos["me/open"]} == {*sent}
    with pytest.raises(ValueError, match=r"step_000001 cannot be used: model\.safetensors is dam"):
        push("me/open", "--checkpoint", "step_000001")
    with pytest.raises(ValueError, match="--checkpoint=best: is not in .*out, which has step_0"):
        push("me/open", "--checkpoint", "best")


def test_an_adapter_whose_base_is_not_on_the_hub_is_refused(tmp_path, hub, push):
    train(tmp_path, "saving.adapter_weights_only=True")
    with pytest.raises(
        ValueError, match="step_000002: has only an adapter, and its base model has"
    ):
        push("me/gone")
    assert "me/gone" not in hub.private
