"""Control tokens whose names begin alike: the longest is meant, typed or written by a template."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mlx_kda.tokenizer.control import ControlTokens

SHORT, LONG, LONGER = "<|end|>", "<|end|>>", "<|end|>>of_turn"
LETTERS = sorted(set("user: hi" + LONGER))


@pytest.fixture(scope="module", params=[(SHORT, LONG, LONGER), (LONGER, LONG, SHORT)])
def control(request):
    """One token a character, and three control tokens, each the beginning of the next."""
    words = {letter: i for i, letter in enumerate([*LETTERS, "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in request.param])
    return ControlTokens(tokenizer)


def ids(control, *parts):
    """Of texts as letters and of control tokens by name."""
    found = []
    for part in parts:
        found += [control.ids[part]] if part in control.ids else [LETTERS.index(c) for c in part]
    return found


@pytest.mark.parametrize("written", [SHORT, LONG, LONGER])
@pytest.mark.parametrize("typed", ["hi", SHORT, LONG, LONGER, "hi" + LONG + "user"])
def test_a_name_that_begins_another_is_not_taken_for_it(control, written, typed):
    """A template writes one of them; a message that types any of them brings letters only."""
    text = control.render(lambda message: f"user: {message} {written}", typed)
    want = [LETTERS.index(c) for c in f"user: {typed} "] + ids(control, written)
    assert list(text.ids) == want
    assert text == f"user: {typed} {written}"


def test_names_that_follow_each_other(control):
    """Short and long ones side by side, the typed one between them."""
    text = control.render(lambda message: LONG + message + SHORT + LONGER, SHORT)
    letters = [LETTERS.index(c) for c in SHORT]
    assert list(text.ids) == [*ids(control, LONG), *letters, *ids(control, SHORT, LONGER)]


def test_plain_text_holds_none_of_them(control):
    for name in (SHORT, LONG, LONGER):
        assert control.encode_text(name, False) == [LETTERS.index(c) for c in name]
        assert control.encode_template(name, False) == [control.ids[name]]
