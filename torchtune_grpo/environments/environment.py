"""The environments of a data set: whom a row meets, and how what it says is encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtune_grpo.config.keys import EnvironmentConfig
from torchtune_grpo.data.chat import PromptEncoder
from torchtune_grpo.environments.adapters import Reply
from torchtune_grpo.environments.calls import Parser, find_parser
from torchtune_grpo.environments.kinds import kind_fault
from torchtune_grpo.environments.replies import ReplyEncoder
from torchtune_grpo.environments.sessions import Kind, Session
from torchtune_grpo.models.tokenizer import HFTokenizer
from torchtune_grpo.rewards.reward import Reward, declares
from torchtune_grpo.trajectory import Completion, Prompt


@dataclass(frozen=True)
class Environment:
    """The kinds of environments of a run, and how a data set's prompts and answers are encoded.

    ``context`` is the most tokens of a prompt and its response. ``parse`` reads tool calls.
    """

    kinds: Mapping[str | None, Kind]
    settings: EnvironmentConfig
    encoder: PromptEncoder
    replies: ReplyEncoder
    parse: Parser | None
    context: int
    stop_tokens: Sequence[int] = ()

    def kind_of(self, columns: Mapping[str, Any]) -> Kind:
        """Return the kind that a row of the data names, if there are several."""
        if (fault := kind_fault(self.kinds, columns)) is not None:
            raise ValueError(f"environment: {fault}.")
        return self.kinds[None if None in self.kinds else columns["environment"]]

    def reset_row(self, columns: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
        """Return what ``reset`` gets: the row, without the column that chooses the environment."""
        row = {**columns, "prompt": prompt.messages if prompt.is_chat else prompt.text}
        return row if None in self.kinds else {n: v for n, v in row.items() if n != "environment"}

    def prompt(
        self, kind: Kind, prompt: Prompt, tokens: list[int], seen: str | None
    ) -> tuple[Prompt, list[int]]:
        """Add what ``reset`` returned to a prompt's last message, and encode it."""
        if seen is None and None in self.kinds:
            return prompt, tokens
        encoder, more = self.encoder, seen or ""
        if None not in self.kinds:
            encoder = encoder.with_tools(kind.schemas)
        *turns, last = prompt.messages
        text = (last["content"] or "") + more
        turns.append({**last, "content": text})
        encoded = encoder(turns if encoder.is_chat else text)
        return Prompt(text, turns, is_chat=prompt.is_chat), encoded

    def encode(self, reply: Reply, *, is_closed: bool) -> list[int]:
        """Encode what follows a turn; ``is_closed``: a stop token has ended that."""
        if reply.text is not None:
            return self.replies.inline(reply.text)
        return self.replies(reply.messages, ended=is_closed)

    def check_sessions(self, columns: Mapping[str, Any], prompt: Prompt) -> None:
        """Begin two conversations about a row at once; raises a ValueError if that fails."""
        kind, sessions = self.kind_of(columns), list[Session]()
        if kind.recipe.component is None:
            return
        for is_second in (False, True):
            sessions.append(kind.session())
            try:
                sessions[-1].reset(self.reset_row(columns, prompt), 0)
            except Exception as error:
                kind.close()
                count, remedy = "a session", "correct it, or its arguments."
                if is_second:
                    count = "a second session beside the first"
                    remedy = (
                        "the conversations of a step are held at once, so let its server take as "
                        "many (OpenEnv: max_concurrent_envs)."
                    )
                raise ValueError(
                    f"environment ({kind.name}): {count} could not begin: {error}; {remedy}"
                ) from error
        kind.idle.extend(sessions)


def environment_rewards(kinds: Mapping[str | None, Kind]) -> list[Reward]:
    """Return the rewards that environments give themselves, named after their classes."""
    names = dict.fromkeys(k.name for k in kinds.values() if k.adds_rewards or k.has_reward)
    return [Reward(name, partial(_own_reward, kind=name)) for name in names]


@declares(reads="completion")
def _own_reward(
    *, completions: Sequence[Completion], kind: str, **columns: Any
) -> list[float | None]:
    """Return what the environments of a kind gave; None for completions of others."""
    return [each.reward if each.kind == kind else None for each in completions]


def prompt_tokenizer(kinds: Mapping[str | None, Kind], tokenizer: Any) -> Any:
    """Return the tokenizer for prompts, which describes the tools if all rows have the same."""
    if kinds and not isinstance(tokenizer, HFTokenizer):
        raise ValueError(
            f"environment: {type(tokenizer).__name__} has no chat template to write answers with; "
            "set tokenizer to torchtune_grpo.models.hf_tokenizer."
        )
    schemas = kinds[None].schemas if None in kinds else ()
    return tokenizer.with_tools(schemas) if schemas else tokenizer


def make_environment(
    kinds: Mapping[str | None, Kind],
    settings: EnvironmentConfig,
    *,
    encoder: PromptEncoder,
    tokenizer: HFTokenizer,
    context: int,
) -> Environment:
    """Make the environment of a data set's prompts; raises a ValueError if the template cannot."""
    uses_tools = any(kind.schemas for kind in kinds.values())
    if not encoder.is_chat and (uses_tools or settings.form == "message"):
        raise ValueError(
            "environment: a new message needs a chat format; set chat=True in the data set, or "
            "environment.form=inline, for an environment that has step(text)."
        )
    if uses_tools and settings.form == "inline":
        raise ValueError("environment.form=inline: needs an environment that has step(text).")
    parse = None
    if uses_tools:
        parse = find_parser(partial(tokenizer.chat_text, add_generation_prompt=False))
    roles = dict.fromkeys(kind.recipe.adapter.role for kind in kinds.values())
    replies = ReplyEncoder(tokenizer, roles=[role for role in roles if role is not None])
    stop_tokens = tokenizer.stop_tokens
    return Environment(kinds, settings, encoder, replies, parse, context, stop_tokens)
