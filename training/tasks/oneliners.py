"""Python one-liners for small, common jobs."""

from __future__ import annotations

from random import Random

from training.tasks.base import Exchange, Persona, ask

LISTS = ("xs", "numbers", "values", "items", "data", "nums", "ys", "scores", "prices", "rows")
TEXTS = ("s", "text", "name", "word", "line", "title", "label", "t")
DICTS = ("d", "table", "mapping", "config", "counts", "ages")
PATHS = ("notes.txt", "data.txt", "log.txt", "names.txt", "input.txt")

# (what to do, the code); {v} is a variable of the kind, {n} a number.
LIST_JOBS = (
    ("sum the list {v}", "sum({v})"), ("reverse the list {v}", "{v}[::-1]"),
    ("sort the list {v}", "sorted({v})"), ("sort the list {v} in descending order", ("sorted({v}, "
    "reverse=True)")),
    ("get the largest element of {v}", "max({v})"), ("get the smallest element of {v}", "min({v})"),
    ("count the elements of {v}", "len({v})"), ("square every element of {v}", "[x ** 2 for x in {v}]"),
    ("double every element of {v}", "[x * 2 for x in {v}]"), ("remove duplicates from {v}", "list(set({v}))"),
    ("keep the even numbers of {v}", "[x for x in {v} if x % 2 == 0]"),
    ("keep the odd numbers of {v}", "[x for x in {v} if x % 2 == 1]"),
    ("compute the average of {v}", "sum({v}) / len({v})"), ("get the last element of {v}", "{v}[-1]"),
    ("get the first element of {v}", "{v}[0]"), ("get the first {n} elements of {v}", "{v}[:{n}]"),
    ("get the last {n} elements of {v}", "{v}[-{n}:]"), ("add {n} to every element of {v}", ("[x + {n} for x "
    "in {v}]")),
    ("multiply every element of {v} by {n}", "[x * {n} for x in {v}]"),
    ("keep the elements of {v} greater than {n}", "[x for x in {v} if x > {n}]"),
    ("count how often {n} occurs in {v}", "{v}.count({n})"), ("check whether {n} is in {v}", "{n} in {v}"),
    ("turn the elements of {v} into strings", "[str(x) for x in {v}]"),
    ("print every element of {v}", "for x in {v}: print(x)"), ("append {n} to {v}", "{v}.append({n})"),
)  # fmt: skip
TEXT_JOBS = (
    ("reverse the string {v}", "{v}[::-1]"), ("turn the string {v} into uppercase", "{v}.upper()"),
    ("turn the string {v} into lowercase", "{v}.lower()"),
    ("count the characters of the string {v}", "len({v})"),
    ("split the string {v} into words", "{v}.split()"),
    ("strip the whitespace from the string {v}", "{v}.strip()"),
    ("count the words of the string {v}", "len({v}.split())"),
    ("check whether the string {v} is a palindrome", "{v} == {v}[::-1]"),
    ("replace spaces by underscores in the string {v}", "{v}.replace(' ', '_')"),
    ("turn the string {v} into an integer", "int({v})"), ("get the first letter of the string {v}", "{v}[0]"),
    ("get the first {n} characters of the string {v}", "{v}[:{n}]"),
    ("repeat the string {v} {n} times", "{v} * {n}"), ("print the string {v}", "print({v})"),
)  # fmt: skip
DICT_JOBS = (
    ("get the keys of the dictionary {v}", "list({v})"),
    ("get the values of the dictionary {v}", "list({v}.values())"),
    ("swap keys and values of the dictionary {v}", "{{b: a for a, b in {v}.items()}}"),
    ("sort the dictionary {v} by value", "dict(sorted({v}.items(), key=lambda p: p[1]))"),
    ("sum the values of the dictionary {v}", "sum({v}.values())"),
    ("count the keys of the dictionary {v}", "len({v})"),
)  # fmt: skip
PATH_JOBS = (
    ("read the file {v}", "open('{v}').read()"),
    ("read the lines of the file {v}", "open('{v}').readlines()"),
    ("count the lines of the file {v}", "len(open('{v}').readlines())"),
)  # fmt: skip
NUMBER_JOBS = (
    ("make a list of the numbers from 0 to {n}", "list(range({m}))"),
    ("make a list of the first {n} squares", "[x ** 2 for x in range({n})]"),
    ("make a list of {n} zeros", "[0] * {n}"), ("print hello {n} times", "print('hello\\n' * {n})"),
    ("sum the numbers from 1 to {n}", "sum(range(1, {m}))"), ("compute the square root of {n}", "{n} ** 0.5"),
)  # fmt: skip
KINDS = (
    (LIST_JOBS, LISTS, 10),
    (TEXT_JOBS, TEXTS, 6),
    (DICT_JOBS, DICTS, 2),
    (PATH_JOBS, PATHS, 1),
    (NUMBER_JOBS, ("",), 1),
)

REQUESTS = (
    "Write a Python one-liner to {job}.", "How do I {job} in Python?", "Python: {job}", ("Python code to "
    "{job}"),
    "Write Python code to {job}.", "Give me a Python one-liner to {job}.", "In Python, {job}.",
    "One line of Python to {job}, please.", "How can I {job} in Python?", "Show me how to {job} in Python.",
    "What is the Python expression to {job}?",
)  # fmt: skip


def oneliners(rng: Random, persona: Persona) -> Exchange:
    """The answer is the bare line of code."""
    del persona
    jobs, variables, _ = rng.choices(KINDS, [weight for *_, weight in KINDS])[0]
    job, code = rng.choice(jobs)
    number = rng.randint(2, 30)
    values = {"v": rng.choice(variables), "n": number, "m": number + 1}
    question = rng.choice(REQUESTS).format(job=job.format(**values))
    return ask("python", question, code.format(**values))
