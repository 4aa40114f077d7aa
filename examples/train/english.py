"""Two small rules of English shared by the preparation and the tasks."""


def sentence(text: str) -> str:
    """Capitalise and close a sentence."""
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else text + "."


def article(word: str) -> str:
    """A noun with its indefinite article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
