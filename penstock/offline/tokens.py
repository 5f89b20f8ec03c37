"""`get_tokenizer()`: the checkpoint's tokenizer under the names that scripts know of transformers'."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.offline.prompts import ChatOptions, MessageLike, PromptMaker


class ModelTokenizer:
    """Text to token ids and back, and conversations to prompts. Defaults are transformers'."""

    def __init__(self, prompts: PromptMaker) -> None:
        self._prompts, self._tokenizer = prompts, prompts.tokenizer

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends an answer; None: there is none."""
        return next(iter(self._tokenizer.eos_ids), None)

    @property
    def all_special_ids(self) -> list[int]:
        """Control tokens."""
        return sorted(self._tokenizer.special_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens` those that the model wants around a text, too.

        Raises:
            InvalidRequest: it is not Unicode.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of one token, or of several."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """As the vocabulary has them."""
        return [self._tokenizer.library.id_to_token(i) or "" for i in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Of one token of the vocabulary; None: there is no such token."""
        return self._tokenizer.token_id(token)

    def apply_chat_template(
        self,
        conversation: Sequence[MessageLike],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,  # noqa: ANN401
    ) -> str | list[int]:
        """The prompt of a conversation: token ids, or with `tokenize=False` text. Other arguments reach the
        template.

        Raises:
            InvalidRequest: as `LLM.chat`.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=kwargs,
        )
        if not tokenize:
            return self._prompts.chat_text(conversation, options)
        return list(self._prompts.chat(conversation, options).token_ids)
