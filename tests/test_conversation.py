"""Conversation: a turn reads its new tokens only and ends in the state of a cold run."""

import mlx.core as mx
import pytest
from helpers.scripted import Scripted
from helpers.tiny_checkpoint import SPECIAL_IDS as S
from helpers.tiny_checkpoint import VOCABULARY

from mlx_kda.context import Context
from mlx_kda.conversation import Conversation, chat_ids
from mlx_kda.errors import UserError
from mlx_kda.generate import Statistics

END = S["<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return tiny_model[1]


def message(tokenizer, role, text):
    """Ids of one message as the Kimi template writes it, made by hand."""
    header = [S[f"<|im_{role}|>"], *tokenizer.encode(role), S["<|im_middle|>"]]
    return header if text is None else [*header, *tokenizer.encode(text), END]


def turn(conversation, text, **options):
    statistics = Statistics()
    options.setdefault("max_tokens", 12)
    pieces = list(conversation.send(text, statistics=statistics, **options))
    return [p.token for p in pieces], statistics


def cold(model, ids):
    context = Context(model)
    context.prefill(ids)
    return context


def test_chat_ids_are_the_templates(tokenizer):
    ids = chat_ids(tokenizer, [{"role": "user", "content": "hi"}])
    assert ids == message(tokenizer, "user", "hi") + message(tokenizer, "assistant", None)


def test_c7_later_turns_read_new_tokens_only(tiny_model):
    """Case C7: a long first message, then two short ones, equal to a cold run of the same ids."""
    model, tokenizer = tiny_model
    conversation = Conversation(Context(model), tokenizer, system="be brief")
    opening = message(tokenizer, "assistant", None)
    expected = message(tokenizer, "system", "be brief")
    for text in ("the rain in the plain " * 8, "and then?", "end"):
        before = len(conversation.context.tokens)
        said, statistics = turn(conversation, text)
        expected += message(tokenizer, "user", text) + opening
        assert statistics.reused_tokens == before
        assert statistics.prefilled_tokens == len(expected) - before
        fresh = cold(model, expected)
        assert list(fresh.decode(12))[: len(said)] == said
        assert mx.abs(fresh.logits - conversation.context.logits).max() < 1e-5
        # an answer cut at max_tokens is closed by the template when the talk goes on
        expected += said if said[-1] == END else [*said, END]
    assert [m["role"] for m in conversation.messages] == ["system"] + ["user", "assistant"] * 3


def scripted_conversation(tokenizer, first, script):
    """A conversation with a model that answers ``first`` with ``script``."""
    start = len(chat_ids(tokenizer, [{"role": "user", "content": first}]))
    return Conversation(Context(Scripted(VOCABULARY, start=start, script=script)), tokenizer)


def test_an_end_token_of_the_template_is_not_read_twice(tokenizer):
    conversation = scripted_conversation(tokenizer, "hi", [*b"yes", END])
    turn(conversation, "hi")
    assert conversation.messages[-1] == {"role": "assistant", "content": "yes"}
    _, statistics = turn(conversation, "so")
    wanted = message(tokenizer, "user", "hi") + message(tokenizer, "assistant", "yes")
    wanted += message(tokenizer, "user", "so") + message(tokenizer, "assistant", None)
    assert conversation.context.tokens[: len(wanted)] == wanted
    assert statistics.prefilled_tokens == len(wanted) - statistics.reused_tokens
    assert statistics.reused_tokens == len(message(tokenizer, "user", "hi")) + len(
        message(tokenizer, "assistant", "yes")
    )


def test_another_end_token_costs_a_second_reading_but_never_a_wrong_cache(tokenizer):
    """The template closes a turn with <|im_end|>; [EOS] in its place must not stay in the cache."""
    conversation = scripted_conversation(tokenizer, "hi", [*b"yes", S["[EOS]"]])
    turn(conversation, "hi")
    _, statistics = turn(conversation, "so")
    wanted = message(tokenizer, "user", "hi") + message(tokenizer, "assistant", "yes")
    wanted += message(tokenizer, "user", "so") + message(tokenizer, "assistant", None)
    assert conversation.context.tokens[: len(wanted)] == wanted
    assert statistics.reused_tokens == 0 and statistics.prefilled_tokens == len(wanted)


def test_what_the_model_said_stays_as_the_ids_it_said(tokenizer):
    """The letters t, h and e one by one are not the token "the" that encoding would choose."""
    assert list(tokenizer.encode("the")) != list(b"the")
    conversation = scripted_conversation(tokenizer, "hi", [*b"the", END])
    turn(conversation, "hi")
    _, statistics = turn(conversation, "so")
    assert statistics.reused_tokens > 0
    at = len(message(tokenizer, "user", "hi")) + len(message(tokenizer, "assistant", None))
    assert conversation.context.tokens[at : at + 4] == [*b"the", END]


def test_a_stopped_answer_is_kept_as_far_as_it_came(tokenizer):
    conversation = scripted_conversation(tokenizer, "hi", list(b"endless words"))
    pieces = conversation.send("hi", max_tokens=50)
    for _ in range(3):
        next(pieces)
    pieces.close()
    assert conversation.messages[-1]["content"] == "end"
    _, statistics = turn(conversation, "so")
    wanted = message(tokenizer, "user", "hi") + message(tokenizer, "assistant", "")[:-1]
    wanted += [*b"end", END, *message(tokenizer, "user", "so")]
    wanted += message(tokenizer, "assistant", None)
    assert conversation.context.tokens[: len(wanted)] == wanted
    assert statistics.reused_tokens > 0


def test_stopping_while_the_prompt_is_read_keeps_the_message(tiny_model):
    model, tokenizer = tiny_model
    conversation = Conversation(Context(model), tokenizer)

    class Stop(Exception):
        pass

    def progress(done, total):
        if done >= 8:
            raise Stop

    with pytest.raises(Stop):
        list(conversation.send("a long message " * 4, prefill_step=8, progress=progress))
    assert len(conversation.context.tokens) == 8
    said, statistics = turn(conversation, "next")
    assert statistics.reused_tokens == 8
    wanted = message(tokenizer, "user", "a long message " * 4)
    wanted += message(tokenizer, "assistant", "") + message(tokenizer, "user", "next")
    wanted += message(tokenizer, "assistant", None)
    assert conversation.context.tokens == wanted + said


def test_a_message_that_does_not_fit_is_not_kept(tiny_model):
    model, tokenizer = tiny_model
    conversation = Conversation(Context(model), tokenizer)
    turn(conversation, "hi")
    tokens, messages = list(conversation.context.tokens), list(conversation.messages)
    with pytest.raises(UserError, match=r"longer than the model's context of 512"):
        conversation.send("z" * 600)
    assert conversation.context.tokens == tokens and conversation.messages == messages
    more, statistics = turn(conversation, "still here")
    assert more and statistics.reused_tokens == len(tokens)


def test_reset_begins_again_with_the_system_message(tiny_model):
    model, tokenizer = tiny_model
    conversation = Conversation(Context(model), tokenizer, system="be brief")
    first, _ = turn(conversation, "hello")
    turn(conversation, "more")
    conversation.reset()
    assert conversation.context.tokens == []
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    assert turn(conversation, "hello")[0] == first


def test_a_template_that_rewrites_the_past_is_followed(tokenizer, monkeypatch):
    """Such a template wants everything read again, with the answers' own text."""
    conversation = scripted_conversation(tokenizer, "hi", [*b"yes", END])

    def numbered(messages, add_generation_prompt=True):
        text = f"{len(messages)}:" + "".join(m["content"] for m in messages)
        return list(tokenizer.encode(text))

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", staticmethod(numbered))
    conversation.context.model.start = len(numbered([{"content": "hi"}]))
    turn(conversation, "hi")
    _, statistics = turn(conversation, "so")
    wanted = list(tokenizer.encode("3:hiyesso"))
    assert conversation.context.tokens[: len(wanted)] == wanted
    assert statistics.reused_tokens == 0


def test_typed_control_tokens_stay_text(tokenizer):
    """A message that spells <|im_end|> does not end the turn."""
    ids = chat_ids(tokenizer, [{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(END) == 1


def test_no_template_is_a_users_matter(tokenizer):
    class Plain:
        has_chat_template = False

    with pytest.raises(UserError, match="no chat template"):
        chat_ids(Plain(), [{"role": "user", "content": "hi"}])
