"""A model's tokenizer and chat template from its folder, with the interface of torchtune's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from difflib import get_close_matches
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from torchtune_grpo.config.text import describe, read_json, shortened

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# The date that Llama 3.2's template itself falls back on.
_TODAY = date(2024, 7, 26)
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


def hf_tokenizer(
    model_dir: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_seq_len: int | None = None,
) -> HFTokenizer:
    """The tokenizer of a model's folder, as transformers reads it, with the model's chat template.

    Prompts are those that the template writes, with Llama 3's dates and Qwen 2.5's default system
    message, which torchtune's own tokenizers leave out (docs/data.md).

    Some templates write today's date. Here it is always 26 July 2024, so that prompts are the same
    in each run; Llama 3's takes another as ``chat_template_kwargs={date_string: ...}``.

    Args:
        model_dir: folder with ``tokenizer.json`` and ``tokenizer_config.json``; if there are some,
            ``chat_template.jinja``, ``generation_config.json`` and ``config.json`` are read, too.
        chat_template_kwargs: variables of the template, such as ``{enable_thinking: false}``.
        max_seq_len: prompts that are longer, in tokens, are refused. None allows all.

    Raises:
        ValueError: if there is no such folder, no tokenizer in it or no end of text, or if the
            template has no such variable.
    """
    kwargs: Any = chat_template_kwargs or {}
    if OmegaConf.is_config(kwargs):
        kwargs = OmegaConf.to_container(kwargs, resolve=True)
    return HFTokenizer(model_dir, dict(kwargs), max_seq_len)


class HFTokenizer:
    """See :func:`hf_tokenizer`, which makes one.

    Attributes:
        bos_id (int | None): of the beginning of text; ``encode`` writes it where transformers does.
        eos_id (int | None): of the end of text.
        pad_id (int): of padding, or else the end of text.
        stop_tokens (list[int]): those that end a response: of ``generation_config.json``, or else
            ``config.json``; ``eos_id``; and the one that closes the assistant's turn in the chat
            template.
        special_tokens (dict[str, int]): control tokens by their text.
        vocab_size (int): the number of tokens; a model may have more rows.
        max_seq_len (int | None): as given.
    """

    # Stands in a text where no token may reach across; encoded, it is nothing.
    CUT = "\ue000\ue001"

    def __init__(
        self, model_dir: str, chat_template_kwargs: dict[str, Any], max_seq_len: int | None
    ) -> None:
        self._where = f"model_dir={model_dir}"
        self.max_seq_len = max_seq_len
        self._hf = _load(model_dir)
        backend = self._hf.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size = len(self._hf)
        from tokenizers import AddedToken

        self._hf.add_tokens([AddedToken(self.CUT, special=True, normalized=False)])
        self._cut_id = self._hf.convert_tokens_to_ids(self.CUT)

        self.bos_id, self.eos_id = self._hf.bos_token_id, self._hf.eos_token_id
        self._adds_bos = backend.encode("a").ids[:1] == [self.bos_id]
        self._template_kwargs = chat_template_kwargs
        self._template = self._dateless_template()
        self._check_template_kwargs()
        self.special_tokens = self._control_tokens()
        ends = {*_end_ids(model_dir), self.eos_id, self._turn_end()}
        self.stop_tokens = sorted(ends - {None})
        if not self.stop_tokens:
            raise ValueError(
                f"{self._where}: names no token that ends a text. Write its id into "
                "generation_config.json, as eos_token_id."
            )
        pad_id = self._hf.pad_token_id
        self.pad_id: int = self.stop_tokens[0] if pad_id is None else pad_id

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has one; base models have none."""
        return self._template is not None

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encodes text, in which the text of a control token is that token."""
        ids = self._hf.backend_tokenizer.encode(text, add_special_tokens=False).ids
        bos = [self.bos_id] if add_bos and self._adds_bos else []
        eos = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*bos, *(token for token in ids if token != self._cut_id), *eos]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes ids to text; one beyond the vocabulary becomes U+FFFD."""
        texts = []
        for known, run in groupby(token_ids, key=lambda token: 0 <= token < self._cut_id):
            ids = list(run)
            texts.append(
                self._hf.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
                if known
                else "\ufffd" * len(ids)
            )
        return "".join(texts)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """What the template makes of messages; encoded without BOS, it is the model's prompt.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            add_generation_prompt: open the assistant's turn at the end.

        Raises:
            ValueError: if there is no template, or if it refuses the messages.
        """
        if self._template is None:
            raise ValueError(
                f"chat=True: {self._where} has no chat template, as base models have none. Set "
                "chat=False for plain text, or put the template into the folder as "
                "chat_template.jinja."
            )
        try:
            text = self._hf.apply_chat_template(
                messages,
                **self._template_kwargs | {"chat_template": self._template},
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # templates are programs
            said = shortened(describe(error), 200)
            raise ValueError(f"chat template: {said}") from error
        return str(text)

    def _dateless_template(self) -> str | None:
        names = {k: v for k, v in self._template_kwargs.items() if k in ("chat_template", "tools")}
        if self._hf.chat_template is None and "chat_template" not in names:
            return None
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
        fixed = {*signature(self._hf.apply_chat_template).parameters}
        fixed -= {"tools", "documents", "chat_template", "kwargs"}
        words = {*re.findall(r"\w+", self._template or "")}
        for name, value in self._template_kwargs.items():
            where = f"chat_template_kwargs.{name}={value!r}"
            if name in fixed:
                raise ValueError(f"{where}: is no variable of the template. Remove it.")
            if name not in {*words, "chat_template", "tools", "documents"}:
                near = get_close_matches(name, words, n=1)
                meant = f" Did you mean {near[0]}?" if near else " Remove it."
                raise ValueError(f"{where}: the chat template has no such variable.{meant}")

    def _control_tokens(self) -> dict[str, int]:
        """The special tokens, and others with which the template marks turns (as DeepSeek's do).

        Not the tags of thinking: they end no turn, and templates look for them in messages.
        """
        turns = ""
        for roles in (("user", "assistant", "user"), ("user",)):  # some take single questions
            with suppress(ValueError):
                turns = self.chat_text(
                    [{"role": role, "content": "a"} for role in roles], add_generation_prompt=False
                )
                break
        written = {*self.encode(turns, add_bos=False, add_eos=False)}
        return {
            token.content: id_
            for id_, token in self._hf.added_tokens_decoder.items()
            if token.content not in (self.CUT, "<think>", "</think>")
            and (token.special or (id_ in written and not token.content.isspace()))
        }

    def _turn_end(self) -> int | None:
        """The control token with which the template closes an assistant's turn, if there is one."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": self.CUT}]
        behind = ""
        with suppress(ValueError):  # some take single questions
            text = self.chat_text(turns, add_generation_prompt=False)
            behind = text.partition(self.CUT)[2]
        first = self.encode(behind, add_bos=False, add_eos=False)[:1]
        return next((token for token in first if token in self.special_tokens.values()), None)


def _load(model_dir: str) -> Any:
    """transformers' tokenizer, read without a word on the terminal and without the network."""
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ValueError(
            f"model_dir={model_dir}: no such folder; `tune download <model> --output-dir "
            f"{model_dir}` fetches a model from the hub."
        )
    if not any((folder / name).is_file() for name in _FILES):
        raise ValueError(
            f"model_dir={model_dir}: holds no tokenizer ({', '.join(_FILES)}). Copy the model's "
            "tokenizer files into it."
        )
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of any kind: each file is read by another parser
        said = shortened(describe(error), 300)
        raise ValueError(f"model_dir={model_dir}: its tokenizer cannot be read: {said}") from error
    finally:
        logging.set_verbosity(verbosity)
    if not tokenizer.is_fast:
        raise ValueError(
            f"model_dir={model_dir}: transformers makes no fast tokenizer of it. Use a folder with "
            "tokenizer.json."
        )
    return tokenizer


def _end_ids(model_dir: str) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        if (Path(model_dir) / name).is_file():
            given = read_json(model_dir, name, key="model_dir").get("eos_token_id")
            ids: list[Any] = given if isinstance(given, list) else [given]
            if not all(type(token) is int for token in ids if given is not None):
                raise ValueError(
                    f"model_dir={model_dir}: {name} says eos_token_id={given!r}, which is no id of "
                    "a token. Write the number of the one that ends a text."
                )
            if given is not None:
                return ids
    return []
