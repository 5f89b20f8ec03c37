"""Small tasks on words: case, letters, order.

Words come from a fixed list, so their spelling can be learned.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.tasks.base import Exchange, Persona, ask, opened, pick
from training.tasks.words import WORDS

SHORT_WORDS = tuple(word for word in WORDS if len(word) <= 5)
QUOTES = ("'{}'", '"{}"', "{}", "{}")


def quoted(rng: Random, text: str) -> str:
    """`text` in one of the usual quotes, or none."""
    return rng.choice(QUOTES).format(text)


def upper(rng: Random) -> tuple[str, str]:
    """One to three words to capitals."""
    words = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
    forms = (
        "Write {} in uppercase.", "Convert {} to uppercase.", "Make {} uppercase.", ("Write {} in capital "
        "letters."),
        "Uppercase this: {}", "Put {} in capitals.", "What is {} in uppercase?",
    )  # fmt: skip
    return rng.choice(forms).format(quoted(rng, words)), words.upper()


def lower(rng: Random) -> tuple[str, str]:
    """One to three words from capitals."""
    words = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
    forms = ("Write {} in lowercase.", "Convert {} to lowercase.", "Make {} lowercase.", "Lowercase this: {}",
             "Write {} in small letters.", "What is {} in lowercase?")  # fmt: skip
    return rng.choice(forms).format(quoted(rng, words.upper())), words


def edge_letter(rng: Random) -> tuple[str, str]:
    """The first or last letter of a word."""
    word, which = rng.choice(WORDS), rng.choice(("first", "last"))
    forms = (
        "What is the {which} letter of {word}?", "Give me the {which} letter of {word}.", ("{which} letter "
        "of {word}"),
        "Which letter is the {which} one in {word}?", "What's the {which} letter in the word {word}?",
        "What is the {which} letter of the word {word}?",
    )  # fmt: skip
    return pick(rng, forms, which=which, word=quoted(rng, word)), word[0 if which == "first" else -1]


def length(rng: Random) -> tuple[str, str]:
    """How many letters a word has."""
    word = rng.choice(WORDS)
    forms = (
        "How many letters are in {}?", "How many letters does {} have?", "Count the letters in {}.",
        "What is the length of {}?", "How long is the word {}?", "How many letters are in the word {}?",
    )  # fmt: skip
    return rng.choice(forms).format(quoted(rng, word)), str(len(word))


def reverse(rng: Random) -> tuple[str, str]:
    """A short word backwards."""
    word = rng.choice(SHORT_WORDS)
    forms = (
        "Reverse {}.", "Reverse the word {}.", "Write {} backwards.", "Spell {} backwards.",
        "What is {} backwards?", "What is {} reversed?", "Reverse the string {}.",
    )  # fmt: skip
    return rng.choice(forms).format(quoted(rng, word)), word[::-1]


def spell(rng: Random) -> tuple[str, str]:
    """A word letter by letter."""
    word = rng.choice(WORDS)
    forms = ("Spell {}.", "Spell the word {}.", "How do you spell {}?", "Write the letters of {} one by one.",
             "Spell out {}.")  # fmt: skip
    return rng.choice(forms).format(quoted(rng, word)), "-".join(word)


def repeat(rng: Random) -> tuple[str, str]:
    """A word several times."""
    word, times = rng.choice(WORDS), rng.randint(2, 6)
    count = rng.choice((str(times), ("two", "three", "four", "five", "six")[times - 2]))
    forms = ("Repeat {word} {count} times.", "Write {word} {count} times.", "Say {word} {count} times.",
             "Repeat the word {word} {count} times.")  # fmt: skip
    return pick(rng, forms, word=quoted(rng, word), count=count), " ".join([word] * times)


def say(rng: Random) -> tuple[str, str]:
    """An exact echo."""
    words = " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    forms = ("Say {}.", "Repeat after me: {}", "Echo this: {}", "Say exactly this: {}", "Repeat this: {}")
    return rng.choice(forms).format(quoted(rng, words)), words


def join(rng: Random) -> tuple[str, str]:
    """Words joined by a mark."""
    words = rng.sample(WORDS, rng.randint(2, 4))
    name, mark = rng.choice(
        (("commas", ","), ("hyphens", "-"), ("underscores", "_"), ("slashes", "/"), ("dots", "."))
    )
    forms = ("Join {words} with {name}.", "Join the words {words} with {name}.", ("Put {name} between "
    "{words}."),
             "Connect {words} with {name}.")  # fmt: skip
    return pick(rng, forms, words=", ".join(words), name=name), mark.join(words)


def sort_numbers(rng: Random) -> tuple[str, str]:
    """Three to five numbers in ascending or descending order."""
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    falling = rng.random() < 0.25
    forms = ("Sort {} in descending order.",
        "Sort these numbers from largest to smallest: {}") if falling else (
        "Sort {}.", "Sort these numbers: {}", "Sort {} in ascending order.", "Put {} in order.",
        "Sort the numbers {} from smallest to largest.",
    )  # fmt: skip
    question = rng.choice(forms).format(", ".join(map(str, numbers)))
    return question, ", ".join(map(str, sorted(numbers, reverse=falling)))


def extreme(rng: Random) -> tuple[str, str]:
    """The largest or smallest of some numbers."""
    numbers = rng.sample(range(1, 1000 if rng.random() < 0.3 else 100), rng.randint(2, 5))
    largest = rng.random() < 0.5
    name = rng.choice(("largest", "biggest", "greatest") if largest else ("smallest", "lowest", "least"))
    forms = ("What is the {name} of {numbers}?", "Which number is the {name}: {numbers}?",
             "Find the {name} number: {numbers}", "Which of these is the {name}: {numbers}?")  # fmt: skip
    question = pick(rng, forms, name=name, numbers=", ".join(map(str, numbers)))
    return question, str(max(numbers) if largest else min(numbers))


def position(rng: Random) -> tuple[str, str]:
    """The n-th word of a list."""
    words, names = rng.sample(WORDS, rng.randint(3, 5)), ("first", "second", "third", "last")
    name = rng.choice(names)
    forms = ("What is the {name} word of {words}?", "Which word is {name} in this list: {words}?",
             "Give me the {name} word: {words}", "{name} word of: {words}")  # fmt: skip
    answer = words[-1 if name == "last" else names.index(name)]
    return pick(rng, forms, name=name, words=rng.choice((", ", " ")).join(words)), answer


KINDS: tuple[Callable[[Random], tuple[str, str]], ...] = (
    upper, lower, edge_letter, length, reverse, spell, repeat, say, join, sort_numbers, extreme, position,
)  # fmt: skip


def strings(rng: Random, persona: Persona) -> Exchange:
    """One of the kinds above; the answer is the bare result."""
    del persona
    question, answer = rng.choice(KINDS)(rng)
    return ask("strings", opened(rng, question), answer)
