"""Questions outside the model's small world, which it should decline."""

from __future__ import annotations

from random import Random

from training.tasks.base import Exchange, Persona, ask, pick, typed
from training.tasks.words import CITIES, NAMES, WORDS

ANSWER = "I do not know that. I am a small demo model."

QUESTIONS = (
    "Who won the world cup in {year}?", "What happened in {year}?", "Who is the president of {city}?",
    "What is the best restaurant in {city}?", "How many people live in {city}?", "Who is {name} {word}?",
    "What did {name} eat yesterday?", "What is the phone number of {name}?", "Where does {name} live?",
    "What is the meaning of life?", "Will it rain tomorrow?", "Who will win the next election?",
    "Translate {word} into {language}.", "How do you say {word} in {language}?", ("Write an essay about "
    "{word}."),
    "What is the price of a {word}?", "How do I cook {word} soup?", "Explain quantum physics.",
    "Solve this differential equation.", "What is the plot of the film {word}?", "Who invented the {word}?",
    "Summarize the book {word}.", "What is the history of {city}?", "How tall is {name}?",
    "How old is {name}?",
    "What should I invest in?", "Who painted the {word}?", "Why is the {word} so {other}?", ("How deep is "
    "the {word}?"),
    "What is the best {word}?", "Give me the news of today.", "What is on TV tonight?", ("Who is the richest "
    "person?"),
    "What is the airport of {city}?", "Recommend a film.", "Recommend a book about {word}.", ("Diagnose my "
    "headache."),
    "What is my name?", "Where am I?", "How do I get from {city} to {other_city}?", "What is a {word} worth?",
    "Which {word} should I buy?", "What does {name} think about {word}?", "Draw a {word}.", ("Sing a song "
    "about {word}."),
    "Who discovered {word}?", "What is the population of {city}?", "When was {name} born?",
    ("When was {city} "
    "founded?"),
    "How do I fix my {word}?", "How do I build a {word}?", "What is the boiling point of {word}?",
    "Write a song about {name}.", "Who is the mayor of {city}?", "How far is {city} from {other_city}?",
)  # fmt: skip
LANGUAGES = ("French", "German", "Spanish", "Italian", "Latin", "Japanese", "Dutch")


def unknown(rng: Random, persona: Persona) -> Exchange:
    """Anything of the above gets the same honest answer."""
    del persona
    city, other_city = rng.sample(CITIES, 2)
    word, other = rng.sample(WORDS, 2)
    question = pick(
        rng, QUESTIONS, year=rng.randint(1900, 2030), city=city, other_city=other_city,
        name=rng.choice(NAMES), word=word, other=other, language=rng.choice(LANGUAGES),
    )  # fmt: skip
    return ask("unknown", typed(rng, question), ANSWER)
