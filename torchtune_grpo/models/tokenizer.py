"""A model's tokenizer and chat template from its folder, with torchtune's tokenizer interface."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from torchtune_grpo.config.text import describe, read_json, shortened

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# The date that Llama 3.2's template itself falls back on
_TODAY = date(2024, 7, 26)
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


OTHER_TOOLS = (
    "Train a model with the form of Qwen 2.5 or 3 (Hermes), Qwen3.5 or Nemotron 3 (XML), Llama 3.1 "
    "or 3.2, GLM 4.5, LFM 2 or Gemma 4; or give an environment with step(text), without calls."
)


class HFTokenizer:
    """The tokenizer of a model's folder, as transformers reads it, with the model's chat template.

    ``chat_template_kwargs`` are variables of the template, such as ``{enable_thinking: false}``.
    Where a template writes today's date, it is always 26 July 2024, so that prompts are the same
    in each run; Llama 3's template takes another date as ``date_string``. Prompts longer than
    ``max_seq_len`` tokens are refused.
    """

    # Marks a place in a text that no token may span; it is encoded as nothing.
    CUT = "\ue000\ue001"

    def __init__(
        self,
        model_dir: str,
        chat_template_kwargs: Mapping[str, object] | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        from tokenizers import AddedToken

        kwargs: Any = chat_template_kwargs or {}
        if OmegaConf.is_config(kwargs):
            kwargs = OmegaConf.to_container(kwargs, resolve=True)
        self._where = f"model_dir={model_dir}"
        self.max_seq_len = max_seq_len
        self._hf = _load(model_dir)
        backend = self._hf.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size = 1 + max(self._hf.get_vocab().values())  # a model may have more rows
        self._hf.add_tokens([AddedToken(self.CUT, special=True, normalized=False)])
        self._cut_id = self._hf.convert_tokens_to_ids(self.CUT)
        self.bos_id, self.eos_id = self._hf.bos_token_id, self._hf.eos_token_id
        self._adds_bos = backend.encode("a").ids[:1] == [self.bos_id]
        self._template_kwargs = dict(kwargs)
        self.template = self._dateless_template()  # empty without one
        self._check_template_kwargs()
        self.special_tokens = self._control_tokens()  # text -> id
        ends = {*_end_ids(model_dir), self.eos_id, self._turn_end()}
        self.stop_tokens = sorted(ends - {None})  # each ends a response
        if not self.stop_tokens:
            raise ValueError(
                f"{self._where}: has no token that ends a text. Write its id into "
                "generation_config.json, as eos_token_id."
            )

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode text, where a control token's text is that token; BOS is as in transformers."""
        ids = self._hf.backend_tokenizer.encode(text, add_special_tokens=False).ids
        bos = [self.bos_id] if add_bos and self._adds_bos else []
        eos = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*bos, *(token for token in ids if token != self._cut_id), *eos]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text; raises a ValueError for an id beyond the vocabulary."""
        ids = list(token_ids)
        if ids and max(ids) >= self._cut_id:
            raise ValueError(f"{self._where}: has no token {max(ids)}.")
        return self._hf.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def chat_text(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> str:
        """Render messages; the result, encoded without BOS, is the model's prompt.

        ``add_generation_prompt`` opens the assistant's turn at the end.
        """
        if not self.template:
            raise ValueError(
                f"chat=True: {self._where} has no chat template, as base models have none. Set "
                "chat=False for plain text, or put the template into the folder as "
                "chat_template.jinja."
            )
        try:
            text = self._hf.apply_chat_template(
                messages,
                **self._template_kwargs | {"chat_template": self.template},
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # templates are programs
            raise ValueError(f"chat template: {shortened(describe(error), 200)}") from error
        return str(text)

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> HFTokenizer:
        """Return one whose prompts describe tools, given as JSON schemas."""
        other = copy.copy(self)
        # Llama's template describes calls even for an empty list.
        other._template_kwargs = {**self._template_kwargs, "tools": [*tools] or None}
        other.template = other._dateless_template()
        if tools and other.template and "tools" not in other.template:
            raise ValueError(f"tools: the chat template describes no tools. {OTHER_TOOLS}")
        return other

    @property
    def added_tokens(self) -> list[str]:
        """The texts that are always one token: control tokens, and others such as <think>."""
        return [token.content for token in self._hf.added_tokens_decoder.values()]

    def _dateless_template(self) -> str:
        """Return the chat template with today's date as a constant."""
        names = {k: v for k, v in self._template_kwargs.items() if k in ("chat_template", "tools")}
        if self._hf.chat_template is None and "chat_template" not in names:
            return ""
        try:
            template = self._hf.get_chat_template(**names)
        except ValueError as error:
            raise ValueError(
                f"{self._where}: has the chat templates {', '.join(self._hf.chat_template)}, and "
                "none is the default. Name one, as in chat_template_kwargs={chat_template: "
                f"{min(self._hf.chat_template)}}}."
            ) from error
        return _NOW.sub(lambda match: json.dumps(_TODAY.strftime(match[2])), template)

    def _check_template_kwargs(self) -> None:
        variables = {*re.findall(r"\w+", self.template)} | {"chat_template"}
        for name in self._template_kwargs:
            if name not in variables - {"messages", "add_generation_prompt"}:
                raise ValueError(
                    f"chat_template_kwargs.{name}: the chat template has no such variable to set. "
                    "Correct or remove it."
                )

    def _control_tokens(self) -> dict[str, int]:
        """Return the special tokens, and others that mark turns in the template, as in DeepSeek's.

        The thinking tags are not among them: they end no turn, and templates look for them in
        messages.
        """
        turns = self._turns("user", "assistant", "user") or self._turns("user")
        written = {*self.encode(turns, add_bos=False, add_eos=False)}
        return {
            token.content: id_
            for id_, token in self._hf.added_tokens_decoder.items()
            if token.content not in (self.CUT, "<think>", "</think>")
            and (token.special or (id_ in written and not token.content.isspace()))
        }

    def _turns(self, *roles: str) -> str:
        """Render turns of these roles, the assistant's empty; "" if the template refuses them."""
        said = {"user": "a", "assistant": self.CUT}
        with suppress(ValueError):  # some take only one question
            messages = [{"role": role, "content": said[role]} for role in roles]
            return self.chat_text(messages, add_generation_prompt=False)
        return ""

    def _turn_end(self) -> int | None:
        """Return the control token with which the template ends an assistant's turn, if any."""
        behind = self._turns("user", "assistant").partition(self.CUT)[2]
        first = self.encode(behind, add_bos=False, add_eos=False)[:1]
        return next((token for token in first if token in self.special_tokens.values()), None)


hf_tokenizer = HFTokenizer  # as configs name it


def is_before_transformers_5() -> bool:
    """Whether transformers is older than GGUF files, and models that it computes itself, need."""
    return int(version("transformers").partition(".")[0]) < 5


@contextmanager
def only_errors() -> Iterator[None]:
    """Let transformers only report errors: what a folder lacks is said here."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _load(model_dir: str) -> Any:
    """Load transformers' fast tokenizer from a folder."""
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ValueError(
            f"model_dir={model_dir}: no such folder; `tune download <model> --output-dir "
            f"{model_dir}` fetches a model from the hub."
        )
    if not any((folder / name).is_file() for name in _FILES):
        raise ValueError(
            f"model_dir={model_dir}: has no tokenizer ({', '.join(_FILES)}). Copy the model's "
            "tokenizer files into it."
        )
    from transformers import AutoTokenizer

    try:
        with only_errors():
            tokenizer = AutoTokenizer.from_pretrained(
                model_dir, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # of any type: each file has its own parser
        said = shortened(describe(error), 300)
        raise ValueError(f"model_dir={model_dir}: could not read its tokenizer: {said}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"model_dir={model_dir}: transformers has no fast tokenizer for it. Use a folder with "
            "tokenizer.json."
        )
    return tokenizer


def _end_ids(model_dir: str) -> list[int]:
    """Return the ids that end a text, from generation_config.json or else config.json."""
    for name in ("generation_config.json", "config.json"):
        if Path(model_dir, name).is_file():
            ids = read_json(model_dir, name, key="model_dir").get("eos_token_id")
            if ids is not None:
                return ids if isinstance(ids, list) else [ids]
    return []
