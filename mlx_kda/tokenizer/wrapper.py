"""The tokenizer that generation uses: mlx-lm's wrapper, but control tokens cannot be typed."""

from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from ..errors import UserError
from .control import ControlTokens, TemplateText, is_unicode
from .detokenizer import ByteDetokenizer, token_pieces
from .files import NAMED, TokenizerFiles, end_ids, named_templates, read_json, token_name

KIMI_TOOLS = "<|tool_calls_section_begin|>"


class KDATokenizer(TokenizerWrapper):
    """mlx-lm's TokenizerWrapper in which typed control tokens stay text.

    ``encode`` takes plain text: ``<|im_end|>`` in it is ten characters, not the token. Pass
    ``allow_special=True`` for text that may hold control tokens. The text that
    ``apply_chat_template`` returns remembers that the template wrote its control tokens, and
    encodes to them. Everything not defined here is transformers' tokenizer's.
    """

    def __init__(self, files: TokenizerFiles, folder: Path, model_config: dict[str, Any]):
        """From files that were read and checked."""
        named = {key: token_name(files.config.get(key)) for key in NAMED}
        context = model_config.get("model_max_length") or files.config.get("model_max_length")
        inner = PreTrainedTokenizerFast(
            tokenizer_object=files.tokenizer,
            chat_template=named_templates(files.chat_template),
            clean_up_tokenization_spaces=False,
            **{key: name for key, name in named.items() if name},
            **({"model_max_length": context} if context else {}),
        )
        generation = read_json(folder / "generation_config.json")
        tools: dict[str, Any] = {}
        if KIMI_TOOLS in str(files.chat_template):
            from mlx_lm.tool_parsers import kimi_k2

            tools = {
                "tool_parser": kimi_k2.parse_tool_call,
                "tool_call_start": TemplateText(kimi_k2.tool_call_start),
                "tool_call_end": TemplateText(kimi_k2.tool_call_end),
            }
        control = ControlTokens(files.tokenizer)
        pieces, strip = token_pieces(files.tokenizer, control.special_ids)
        self._control = control
        super().__init__(
            inner,
            lambda _: ByteDetokenizer(pieces, strip),
            eos_token_ids=end_ids(files, model_config, generation),
            **tools,
        )
        # mlx-lm encodes these to find them in generated ids: they are not typed text
        self._think_start = self._think_start and TemplateText(self._think_start)
        self._think_end = self._think_end and TemplateText(self._think_end)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of all control tokens that are never shown, reserved ones too."""
        return sorted(self._control.special_ids)

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special: bool = False, **kwargs: Any
    ) -> list[int]:
        """Token ids of a string.

        Args:
            text: plain text, or what ``apply_chat_template(tokenize=False)`` returned.
            add_special_tokens: add BOS or EOS where the checkpoint does so.
            allow_special: control tokens spelled in plain text are control tokens.
            kwargs: none is supported; transformers' padding and truncation raise TypeError.

        Raises UserError for a text that cannot be encoded as UTF-8.
        """
        if isinstance(text, TemplateText):
            if text.ids is not None:
                return list(text.ids)
            allow_special = True
        if kwargs:
            raise TypeError(f"encode does not take {', '.join(sorted(kwargs))}")
        if isinstance(text, str) and not is_unicode(text):
            # where the locale is C, a pipe's bytes that are not UTF-8 come as such halves
            raise UserError("the text holds a byte that is not UTF-8, or half a surrogate pair")
        if allow_special:
            return self._control.encode_template(text, add_special_tokens)
        return self._control.encode_text(text, add_special_tokens)

    def apply_chat_template(  # type: ignore[override]  # mlx-lm passes any arguments on
        self,
        conversation: list[dict[str, Any]],
        tools: list[Any] | None = None,
        documents: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> list[int] | TemplateText:
        """Render messages with the checkpoint's template, in jinja's sandbox.

        Control tokens in messages, tools, documents and template variables stay text. Further
        arguments are transformers' (add_generation_prompt, continue_final_message, chat_template,
        variables of the template). Returns ids, or with ``tokenize=False`` the text, which
        ``encode`` turns into the same ids.

        Raises UserError where there is no template, or the template refuses the messages.
        """
        if not conversation:
            raise UserError("there are no messages to apply the chat template to")
        if tools:
            tools = [get_json_schema(tool) if callable(tool) else tool for tool in tools]
        kwargs.pop("return_dict", None)
        options = {
            key: kwargs.pop(key)
            for key in ("add_generation_prompt", "continue_final_message", "chat_template")
            if key in kwargs
        }
        inputs = {"conversation": conversation, "tools": tools, "documents": documents} | kwargs

        def template(inputs: dict[str, Any]) -> str:
            return TokenizerWrapper.apply_chat_template(self, tokenize=False, **inputs, **options)

        if not (self.has_chat_template or options.get("chat_template")):
            raise UserError("this checkpoint has no chat template; give the prompt as plain text")
        try:
            text = self._control.render(template, inputs)
        except Exception as error:  # the template is the checkpoint's code and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"the chat template refuses these messages: {reason}") from error
        return list(text.ids or ()) if tokenize else text
