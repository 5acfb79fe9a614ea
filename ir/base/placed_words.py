"""Advice for a word that a call does not take: another call takes it, or it is misspelt. Public calls note their words."""

from collections.abc import Collection, Iterable, Mapping

from pippy.ir.base.brief import some
from pippy.ir.base.errors import InputError
from pippy.ir.base.near_names import near_names

_calls: dict[str, list[str]] = {}  # the calls that take a word, as one writes them


def place_words(usage: str, words: Iterable[str]) -> None:
    """Note that a call takes these words. It is written as in "pipeline(model, loss_fn)"."""
    for word in words:
        written = [each.partition("=")[0].strip() for each in usage.partition("(")[2].rstrip(")").split(",")]
        shown = usage if word in written else f"{usage[:-1]}, {word}=...)"
        if shown not in _calls.setdefault(word, []):
            _calls[word].append(shown)


def hint(word: str, accepted: Collection[str]) -> str:
    """The advice for a word that a call with the words ``accepted`` does not take; empty if there is none.

    >>> place_words("sew(pieces, x)", ["pieces", "buttonholes"])
    >>> hint("pieces", ["x"]), hint("butonholes", ["x"])
    ('it belongs to sew(pieces, x)', 'did you mean buttonholes=, as in sew(pieces, x, buttonholes=...)?')
    >>> hint("loss_fun", ["loss_fn", "split"])
    'did you mean loss_fn=?'
    """
    if word in _calls:
        return f"it belongs to {' or '.join(_calls[word][:2])}"
    near = near_names(word, accepted, most=2, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(f'{each}=' for each in near)}?"
    far = near_names(word, _calls, most=1, cutoff=0.75)
    return f"did you mean {far[0]}=, as in {_calls[far[0]][0]}?" if far else ""


def hints(words: Iterable[str], accepted: Collection[str]) -> str:
    """The hints for several words, each with its word if there are more."""
    by_word = {word: hint(word, accepted) for word in words}
    told = [f"{word}=: {text}" if len(by_word) > 1 else text for word, text in by_word.items() if text]
    return "; ".join(told)


def refuse_words(
    call: str, keywords: Mapping[str, object], accepted: Collection[str], unless_known: bool = False
) -> None:
    """Raise if a call gets words that are not its own. With ``unless_known``, only for words with a hint.

    >>> refuse_words("make", {"sise": 3}, ["size"])
    Traceback (most recent call last):
    pippy.ir.base.errors.InputError: make() takes no sise=; did you mean size=?
    """
    unknown = [word for word in keywords if word not in accepted]
    told = hints(unknown, accepted)
    if unknown and (told or not unless_known):
        words = ", ".join(f"{word}=" for word in unknown)
        raise InputError(f"{call}() takes no {words}; {told or 'it takes ' + ', '.join(some(accepted, most=30))}")
