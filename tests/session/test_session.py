"""Session: a turn reads its new tokens only and ends in the state of a cold run."""

import mlx.core as mx
import pytest
from helpers.scripted import Scripted
from helpers.tiny import difference
from helpers.tiny_checkpoint import SPECIAL_IDS as S
from helpers.tiny_checkpoint import VOCABULARY, write_checkpoint
from tolerances import MODEL_LONG

import mlx_kda
from mlx_kda.context import Context
from mlx_kda.errors import UserError
from mlx_kda.generate import Statistics, stream_generate
from mlx_kda.session import Session
from mlx_kda.transcript import chat_ids

END = S["<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return tiny_model[1]


def message(tokenizer, role, text):
    """Ids of one message as the Kimi template writes it, made by hand."""
    header = [S[f"<|im_{role}|>"], *tokenizer.encode(role), S["<|im_middle|>"]]
    return header if text is None else [*header, *tokenizer.encode(text), END]


def turn(session, text, **options):
    statistics = Statistics()
    options.setdefault("max_tokens", 12)
    pieces = list(session.send(text, statistics=statistics, **options))
    return [p.token for p in pieces], statistics


def cold(model, ids):
    context = Context(model)
    context.prefill(ids)
    return context


def assert_as_cold(session):
    """The logits are those of a run that reads the session's tokens in one go."""
    context = session.context
    assert difference(context.logits, cold(context.model, session.tokens).logits) < MODEL_LONG


def test_chat_ids_are_the_templates(tokenizer):
    ids = chat_ids(tokenizer, [{"role": "user", "content": "hi"}])
    assert ids == message(tokenizer, "user", "hi") + message(tokenizer, "assistant", None)


def test_later_turns_read_new_tokens_only(tiny_model):
    """A long first message, then two short ones, equal to a cold run of the same ids."""
    model, tokenizer = tiny_model
    session = Session(model, tokenizer, system="be brief")
    opening = message(tokenizer, "assistant", None)
    expected = message(tokenizer, "system", "be brief")
    for text in ("the rain in the plain " * 8, "and then?", "end"):
        before = len(session.context.tokens)
        said, statistics = turn(session, text)
        expected += message(tokenizer, "user", text) + opening
        assert statistics.reused_tokens == before
        assert statistics.prefilled_tokens == len(expected) - before
        fresh = cold(model, expected)
        assert list(fresh.decode(12))[: len(said)] == said
        assert difference(fresh.logits, session.context.logits) < MODEL_LONG
        # an answer cut at max_tokens is closed by the template when the talk goes on
        expected += said if said[-1] == END else [*said, END]
    assert [m["role"] for m in session.messages] == ["system"] + ["user", "assistant"] * 3


def scripted_session(tokenizer, first, script):
    """A session with a model that answers ``first`` with ``script``."""
    start = len(chat_ids(tokenizer, [{"role": "user", "content": first}]))
    return Session(Scripted(VOCABULARY, start=start, script=script), tokenizer)


ENDED = {
    "the template's end token is not read twice": ([*b"yes", END], 4),
    # [EOS] in the place of <|im_end|> must not stay in the cache: back to before the answer
    "after another end token the answer is read again": ([*b"yes", S["[EOS]"]], 0),
    # t, h and e one by one are not the token "the" that encoding would choose
    "what was said stays as the ids that were said": ([*b"the", END], 4),
}


@pytest.mark.parametrize("name", ENDED)
def test_a_turn_after_an_answer(tokenizer, name):
    """The ids are those of the template, and only what the cache has not read is read."""
    assert list(tokenizer.encode("the")) != list(b"the")
    script, kept = ENDED[name]
    session = scripted_session(tokenizer, "hi", script)
    turn(session, "hi")
    assert session.messages[-1] == {"role": "assistant", "content": bytes(script[:3]).decode()}
    _, statistics = turn(session, "so")
    opening = message(tokenizer, "assistant", None)
    prompt = message(tokenizer, "user", "hi") + opening
    wanted = [*prompt, *script[:3], END, *message(tokenizer, "user", "so"), *opening]
    assert session.context.tokens[: len(wanted)] == wanted
    assert statistics.reused_tokens == len(prompt) + kept
    assert statistics.prefilled_tokens == len(wanted) - statistics.reused_tokens


def test_a_stopped_answer_is_kept_as_far_as_it_came(tokenizer):
    session = scripted_session(tokenizer, "hi", list(b"endless words"))
    pieces = session.send("hi", max_tokens=50)
    for _ in range(3):
        next(pieces)
    pieces.close()
    assert session.messages[-1]["content"] == "end"
    _, statistics = turn(session, "so")
    wanted = message(tokenizer, "user", "hi") + message(tokenizer, "assistant", "")[:-1]
    wanted += [*b"end", END, *message(tokenizer, "user", "so")]
    wanted += message(tokenizer, "assistant", None)
    assert session.context.tokens[: len(wanted)] == wanted
    assert statistics.reused_tokens > 0


def test_stopping_while_the_prompt_is_read_keeps_the_message(tiny_model):
    model, tokenizer = tiny_model
    session = Session(model, tokenizer)

    class Stop(Exception):
        pass

    def progress(done, total):
        if done >= 8:
            raise Stop

    with pytest.raises(Stop):
        list(session.send("a long message " * 4, prefill_step=8, progress=progress))
    assert len(session.context.tokens) == 8
    said, statistics = turn(session, "next")
    assert statistics.reused_tokens == 8
    wanted = message(tokenizer, "user", "a long message " * 4)
    wanted += message(tokenizer, "assistant", "") + message(tokenizer, "user", "next")
    wanted += message(tokenizer, "assistant", None)
    assert session.context.tokens == wanted + said


def test_a_message_that_does_not_fit_is_not_kept(tiny_model):
    model, tokenizer = tiny_model
    session = Session(model, tokenizer)
    turn(session, "hi")
    tokens, messages = list(session.context.tokens), list(session.messages)
    with pytest.raises(UserError, match=r"longer than the model's context of 512"):
        session.send("z" * 600)
    assert session.context.tokens == tokens and session.messages == messages
    more, statistics = turn(session, "still here")
    assert more and statistics.reused_tokens == len(tokens)


def test_reset_begins_again_with_the_system_message(tiny_model):
    session = Session(*tiny_model, system="be brief")
    first, _ = turn(session, "hello")
    turn(session, "more")
    session.reset()
    assert session.context.tokens == []
    assert session.messages == [{"role": "system", "content": "be brief"}]
    assert turn(session, "hello")[0] == first


def test_a_template_that_rewrites_the_past_is_followed(tokenizer, monkeypatch):
    """Such a template wants everything read again, with the answers' own text."""
    session = scripted_session(tokenizer, "hi", [*b"yes", END])

    def numbered(messages, add_generation_prompt=True):
        text = f"{len(messages)}:" + "".join(m["content"] for m in messages)
        return list(tokenizer.encode(text))

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", staticmethod(numbered))
    session.context.model.start = len(numbered([{"content": "hi"}]))
    turn(session, "hi")
    _, statistics = turn(session, "so")
    wanted = list(tokenizer.encode("3:hiyesso"))
    assert session.context.tokens[: len(wanted)] == wanted
    assert statistics.reused_tokens == 0


def test_no_template_is_a_users_matter(tokenizer):
    class Plain:
        has_chat_template = False

    with pytest.raises(UserError, match="no chat template"):
        chat_ids(Plain(), [{"role": "user", "content": "hi"}])


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """Model and tokenizer with room for 16,384 tokens."""
    return mlx_kda.load(
        write_checkpoint(tmp_path_factory.mktemp("roomy") / "hf", model_max_length=16384)
    )


USER = "the rain in the plain " * 240


@pytest.mark.parametrize("policy", ["exact", "window:1024+16", "int8"])
def test_turn_two_of_a_long_conversation(roomy, policy):
    """3,000 tokens, then two short turns; edit, regenerate, the same prompt again."""
    model, tokenizer = roomy
    session = Session(model, tokenizer, policy, prefill_step=1000)
    first, start = turn(session, USER)
    assert start.prefilled_tokens > 3000 and start.reused_tokens == 0
    answer = session.messages[-1]["content"]
    second, statistics = turn(session, "and then?")
    assert statistics.prefilled_tokens < 40
    assert statistics.reused_tokens == start.prefilled_tokens + len(first)
    turn(session, "end")

    def logits(ids):
        context = Context(model, policy=policy)
        context.prefill(ids)
        return context.logits

    limit = 4e-4 if policy == "int8" else MODEL_LONG
    assert difference(session.context.logits, logits(session.tokens)) < limit
    assert mx.abs(session.context.logits).max() > 1

    # edit the last message: back to the end of the answer before it
    edited = [*session.messages[:4], {"role": "user", "content": "other"}]
    list(session.send(edited, max_tokens=5))
    assert session.statistics.prefilled_tokens < 40 and session.statistics.reused_tokens > 3000
    assert difference(session.context.logits, logits(session.tokens)) < limit
    # regenerate: nothing to read, the same answer
    said = session.messages[-1]["content"]
    list(session.regenerate(max_tokens=5))
    assert session.statistics.prefilled_tokens == 0 and session.messages[-1]["content"] == said
    # the same prompt again
    list(session.send(edited, max_tokens=5))
    assert session.statistics.prefilled_tokens == 0 and session.messages[-1]["content"] == said
    # the second turn anew, from the messages alone
    talk = [{"role": "user", "content": USER}, {"role": "assistant", "content": answer}]
    list(session.send([*talk, {"role": "user", "content": "and then?"}], max_tokens=12))
    assert session.statistics.prefilled_tokens < 40
    assert session.context.tokens[-len(second) :] == second


def test_undo_takes_back_one_turn_at_a_time(roomy):
    model, tokenizer = roomy
    session = Session(model, tokenizer, system="be brief")
    states = []
    for text in ("one", "two", "three"):
        states.append((session.tokens, list(session.messages)))
        turn(session, text)
    for text, (tokens, messages) in zip(("three", "two"), states[:0:-1], strict=True):
        assert session.undo() == text
        assert session.tokens == tokens and session.messages == messages
    assert session.undo() == "one" and session.messages == states[0][1]
    assert session.undo() is None
    again, _ = turn(session, "one")
    other = Session(model, tokenizer, system="be brief")
    assert turn(other, "one")[0] == again


def test_a_fork_and_its_origin_go_their_own_ways(roomy):
    session = Session(*roomy)
    turn(session, "one")
    fork = session.fork()
    told = turn(session, "two")[0]
    assert turn(fork, "three")[1].prefilled_tokens < 40
    assert [m["content"] for m in fork.messages[2::2]] == ["three"]
    assert [m["content"] for m in session.messages[2::2]] == ["two"]
    for one in (session, fork):
        assert_as_cold(one)
    fork.undo()
    assert turn(fork, "two")[0] == told


def test_checkpoints_of_a_session(roomy):
    session = Session(*roomy, checkpoint_every=512, prefill_step=256)
    ids = [(5 * i * i + i) % 256 for i in range(1500)]
    session.prefill(ids)
    assert [point.offset for point in session.context.checkpoints] == [512, 1024]
    mine = session.checkpoint()
    first = [piece.token for piece in session.generate(8)]
    session.rewind(mine)
    assert session.tokens == ids
    assert [piece.token for piece in session.generate(8)] == first
    session.rewind(700)
    assert session.tokens == ids[:700]
    assert_as_cold(session)
    with pytest.raises(UserError, match="1,500 tokens"):
        session.rewind(mine)


def test_rewinding_into_a_conversation_forgets_its_later_messages(roomy):
    session = Session(*roomy, system="be brief")
    turn(session, "one")
    place = session.checkpoint()
    turn(session, "two")
    session.rewind(place)
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]
    _, statistics = turn(session, "three")
    assert statistics.reused_tokens == place.offset
    assert_as_cold(session)


def test_text_goes_on_as_stream_generate_does(roomy):
    model, tokenizer = roomy
    session = Session(model, tokenizer)
    session.prefill("the rain")
    session.prefill(" in the plain")
    got = [piece.token for piece in session.generate(max_tokens=6, stop_ids=[])]
    want = stream_generate(model, tokenizer, session.tokens[:-6], max_tokens=6, stop_ids=[])
    assert got == [piece.token for piece in want]
    assert session.statistics.generation_tokens == 6


def test_another_system_message_is_read_and_the_talk_kept(roomy):
    session = Session(*roomy, system="be brief")
    turn(session, "one")
    session.set_system("be long")
    _, statistics = turn(session, "two")
    assert session.messages[0]["content"] == "be long" and len(session.messages) == 5
    assert statistics.prefilled_tokens > 20
    assert_as_cold(session)


def test_layers_say_what_was_asked_and_what_is_in_force(roomy):
    model, tokenizer = roomy
    session = Session(model, tokenizer, "window:64+4,int8")
    assert [layer.now for layer in session.layers()] == [0] * 4
    session.prefill([1, 2, 3])
    kda, *_, mla = session.layers()
    assert (kda.kind, mla.kind) == ("kda", "mla") and mla.asked == "window:64+4,int8"
    assert "8 bits" in mla.in_force and "last 64" in mla.in_force and "first 4" in mla.in_force
    assert kda.now == kda.bytes_at(0) == kda.bytes_at(10**6)
    assert mla.now == mla.bytes_at(0) == mla.bytes_at(10**6)
    for policy in ("exact", "int4"):
        mla = Session(model, tokenizer, policy).layers()[-1]
        assert mla.bytes_at(200) == 2 * mla.bytes_at(100) > 0


def test_an_empty_message_is_one(tiny_model):
    assert list(Session(*tiny_model).send("", max_tokens=1))


@pytest.mark.parametrize(
    ("message", "options", "words"),
    [
        *((wrong, {}, "message") for wrong in ([], [{"role": "user"}], [1], 7)),
        ("a\ud800b", {}, "half a surrogate pair"),
        ("hi", {"prefill_step": 0}, "at least 1 token"),
    ],
)
def test_what_cannot_be_sent_is_refused(tiny_model, message, options, words):
    session = Session(*tiny_model)
    with pytest.raises(UserError, match=words):
        list(session.send(message, max_tokens=1, **options))
    assert session.tokens == [] and (options or session.messages == [])


def test_regenerate_needs_a_message(tiny_model):
    with pytest.raises(UserError, match="no message to answer"):
        Session(*tiny_model).regenerate()


def test_logits_that_are_not_finite_end_the_answer_and_lose_no_message(tokenizer):
    """One clear line; the messages are kept, and the next turn reads everything anew."""
    start = len(chat_ids(tokenizer, [{"role": "user", "content": "hi"}]))
    model = Scripted(VOCABULARY, start=start, script=list(b"words"), poison=start + 2)
    session = Session(model, tokenizer)
    with pytest.raises(UserError, match="not finite"):
        list(session.send("hi", max_tokens=5))
    assert [m["role"] for m in session.messages] == ["user", "assistant"]
    assert session.tokens == [] and len(session.context.checkpoints) == 0
    model.poison = None
    _, statistics = turn(session, "so")
    assert statistics.reused_tokens == 0 and session.messages[0]["content"] == "hi"


ASKED = {
    "send": lambda session: list(session.send("and then?", max_tokens=4)),
    "generate": lambda session: list(session.generate(max_tokens=4)),
    "prefill": lambda session: session.prefill("so it is"),
    "undo": lambda session: session.undo(),
    "system": lambda session: session.set_system("be brief"),
    "checkpoint": lambda session: session.checkpoint(),
    "rewind": lambda session: session.rewind(5),
    "reset": lambda session: session.reset(),
    "fork": lambda session: session.fork(),
}


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("asked", ASKED)
def test_an_answer_left_open_changes_nothing_later(tiny_model, asked, speculate):
    """An iterator that somebody still holds (a notebook's traceback does) ends with the next call.

    Closed later it put back the ids of its own answer, so that the next turn forgot a question;
    with speculation it moved the cache under the new text.
    """
    held, other = (Session(*tiny_model) for _ in range(2))
    pieces = [
        s.send("the rain in the plain", max_tokens=20, speculate=speculate) for s in (held, other)
    ]
    for _ in range(3):
        assert next(pieces[0]).token == next(pieces[1]).token
    pieces[1].close()
    for session in (held, other):
        ASKED[asked](session)
    pieces[0].close()  # as when the one who held it lets it go
    assert held.tokens == other.tokens and held.messages == other.messages
    assert turn(held, "and now?")[0] == turn(other, "and now?")[0]
    assert held.tokens == other.tokens
    assert_as_cold(held)


def test_a_session_saved_in_the_middle_of_an_answer_is_whole(tiny_model, tmp_path):
    """With speculation the cache is ahead of the tokens while an answer is open."""
    session = Session(*tiny_model)
    pieces = session.send("the rain in the rain in the rain", max_tokens=20, speculate=True)
    said = [next(pieces).token for _ in range(3)]
    session.save(tmp_path / "a.session")
    loaded = Session.load(tmp_path / "a.session", *tiny_model)
    assert loaded.tokens[-3:] == said and loaded.messages == session.messages
    assert_as_cold(loaded)
    assert turn(loaded, "and now?")[1].reused_tokens == len(session.tokens)


def test_what_follows_an_ended_answer_is_no_part_of_it(tiny_model):
    """After an undo the text ends in the end token of the answer before, not in the answer."""
    session = Session(*tiny_model)
    turn(session, "the rain", max_tokens=3)
    turn(session, "and then?", max_tokens=3)
    session.undo()
    session.context.reuse(session.transcript.ids)
    session.context.prefill(session.transcript.ids[len(session.tokens) :])
    before = [dict(m) for m in session.messages]
    list(session.generate(max_tokens=3))
    assert session.messages == before
