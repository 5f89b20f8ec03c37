"""`model: "auto"`: which model a request needs, by how complex it looks.

    complexity = sum of weight * mark, less the weight of simple tasks, cut to 0..1
    model      = the smallest whose bound is not below it, and not below the tier's least

A mark is a number from 0 to 1: what in a request's text and shape hints at how hard it is, found by words and
counting, without patterns, in time in proportion to the text, which is bounded. English has most of the
words; the other languages have the ones that decide most. Marks can be read: the decision carries every part,
for the log, for a response header and for tuning the weights. training/complexity.py measures it on
labelled requests. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.config.routing import AutoModel
from penstock.policy.placement.pick import ComplexityChoice


def _listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


_CODE = _listed("""
    algorithm api array async bash bug bytecode c++ callback class code compile compiler concurrency
    coroutine css cuda database deadlock debug django docker exception function git go golang goroutine
    html implement java javascript json kernel kubernetes library linux loop macro mutex mysql node null
    numpy ocaml operator pandas parser pointer postgres postgresql programm python query react recursion
    refactor regex repository rust schema script segfault server service shell sql stack struct test
    tests thread typescript yaml codebase traceback latency pod pods endpoint programa código schreibe
    funktion datenbank fonction código servicio dienst api 代码 函数 数据 服务 コード 関数 код функция
""")
_CODE_SIGNS = (
    "```",
    "def ",
    "();",
    "();\n",
    "Traceback",
    "Error:",
    "SELECT ",
    "#include",
    "=>",
    " = [",
    "){",
    ") {",
    "const ",
)
_REASONING = _listed("""
    analyse analyze argue argument arguments assumption assumptions causal cause caveats compare concede
    conclude conclusion confident confounded constraint constraints contradiction contradictions
    contradict criteria decide dependencies derive derived design determined disagree distinguish
    estimator evaluate evidence expected experiment expectation falsify feasible flaw flaws generalise
    generalize grade hypotheses hypothesis implication implications incentives infer integral
    interleaving invariant invariants irrational justify likelihood logic loopholes mathematically model
    optimal order-of-growth plausible premise prime primes probability proof propose prove proves
    rationale reason reasoning recommend reconcile rigorous risk risks root-cause scenario scenarios
    second-order sequence show solve steps strategy synthesis theorem trade-off trade-offs tradeoff
    tradeoffs uncertain uncertainty unify verify versus vs why bisect theorem's chance integer integers
    bias biased correlated diagnose narrow migrate migration reconcile research rollback roll-back
    simulate roster timeline beweise bestimme begründe vergleiche prüfe untersuche zeige
    wahrscheinlichkeit nachweisen strategie démontrer prouver comparer justifier hypothèses arguments
    probabilité expliquez demuestra calcula compara explica hipótesis probabilidad diseña analiza
    докажите докажи сравните объясните вычислите
""")
_REASONING_SIGNS = (
    "step by step", "show that", "what would", "how would you", "how many ways", "how do i get at",
    "trade-off", "what follows", "such that", "so that", "what else", "which of", "in what sense",
    "what could we", "why does", "why do", "why can't", "how confident", "under which", "walk through",
    "how should", "find all", "at which", "only when", "in which", "what is going on", "where do i", "except",
    "as a pure", "subject to", "as long as", "ohne dass", "woran kann", "sans utiliser", "证明", "分析",
    "比较",
    "原因", "排查", "求め", "計画", "説明", "ohne",
)  # fmt: skip
_SIMPLE = _listed("""
    translate summarize summarise summary tl;dr shorten condense rephrase rewrite proofread correct fix
    convert extract classify tag label define spell list name suggest recommend round hi hello hey
    thanks thank thx cheers bye goodnight goodbye lol ok okay yes no please morning ping headline
    caption slogan joke haiku limerick tweet synonyms birthday weather timer alarm call play remind
    reminder pull find get give tell hallo danke tschüss übersetze fasse nenne formuliere bonjour merci
    salut traduis résume hola gracias adiós traduce corrige resume cuéntame ciao grazie obrigado olá 你好
    谢谢 翻译 おはよう ありがとう привет спасибо
""")
_SIMPLE_STARTS = (
    "what is", "what's", "what does", "who", "when", "where is", "which", "how do i", "how do you", "how to",
    "how tall", "how many days", "do you", "is this", "can you recommend", "what year", "give me",
    "give only", "what language", "wie heißt", "wann", "quelle est", "combien", "quién", "cuál", "qual",
    "quanti", "wie sagt",
)  # fmt: skip
_DEMANDS = _listed("""
    must exactly without unless never only each every both all under within between least most but
    before after then including handle constraints requirements because although whereas and muss genau
    ohne jede jeder chaque sans cada sin must-have
""")
_HEAD_CHARS, _TAIL_CHARS = 500, 300
"""Instructions stand at the beginning or the end; what is between is more often material."""
_STRIP = ".,;:!?\"'()[]{}<>«»“”„`*_¿¡。、?!,"


def instruction_of(text: str) -> str:
    """The part of a message that says what to do: its head and its tail, in lower case."""
    if len(text) > _HEAD_CHARS + _TAIL_CHARS:
        text = f"{text[:_HEAD_CHARS]}\n{text[-_TAIL_CHARS:]}"
    return text.lower()


def words_of(text: str) -> list[str]:
    """The words, without the punctuation around them. O(characters)."""
    return [word for raw in text.split() if (word := raw.strip(_STRIP))]


def code_mark(text: str, words: Sequence[str]) -> float:
    """Code in the text, or asked for."""
    hits = len(_CODE.intersection(words)) + sum(sign in text for sign in _CODE_SIGNS)
    return _saturated(hits + _parts(text, ("代码", "函数", "服务", "コード", "数据")))


def reasoning_mark(instruction: str, words: Sequence[str]) -> float:
    """Words of proof, comparison, planning, diagnosis and judgement in the instruction."""
    return _saturated(len(_REASONING.intersection(words)) + _parts(instruction, _REASONING_SIGNS))


def question_mark(instruction: str, words: Sequence[str]) -> float:
    """The shape of what is asked: length, demands, several questions, items."""
    lengths = min(1.0, max(0, len(words) - 8) / 45)
    demands = _saturated(sum(word in _DEMANDS for word in words) / 3)
    numbers = sum(any(letter.isdigit() for letter in word) for word in words)
    several = min(1.0, max(0, instruction.count("?") - 1) / 2 + instruction.count(":") / 6 + numbers / 12)
    # Scripts without spaces between words: a character counts for half a word.
    wide = sum(letter > "\u2e80" for letter in instruction)
    return min(1.0, 0.5 * max(lengths, min(1.0, wide / 60)) + 0.3 * demands + 0.2 * several)


def simple_mark(instruction: str, words: Sequence[str]) -> float:
    """Greetings, thanks, look-ups, translations, extractions: by how the message begins, and by being
    short.
    """
    starts = instruction.lstrip().startswith(_SIMPLE_STARTS)
    begins = (
        bool(_SIMPLE.intersection(words[:6])) or _parts(instruction[:16], ("你好", "おはよう", "翻译")) > 0
    )
    short = max(0.0, 1 - len(words) / 16)
    return min(1.0, 0.5 * (starts or begins) + 0.5 * short)


def tools_mark(num_tools: int, num_results: int) -> float:
    """Tools that may be called and results to make sense of."""
    return min(1.0, num_tools / 16 + num_results / 4)


def _parts(text: str, signs: Sequence[str]) -> int:
    return sum(sign in text for sign in signs)


def _saturated(hits: float) -> float:
    """0 for none, then a half, three quarters, ...: the first hint tells most."""
    return 1 - 0.5**hits


_CHARS_PER_TOKEN = 4
"""Good enough for one mark: the model, and so its tokenizer, is not chosen yet."""


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """The features of a request on which the choice depends."""

    texts: Sequence[str]
    """Of the user's messages, in order; a plain prompt is one."""
    num_chars: int
    """Of the whole conversation, system prompt and answers included."""
    num_tools: int = 0
    """Tools that it defines."""
    num_tool_results: int = 0
    tier: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class ComplexityWeights:
    """How much each mark of a request counts towards its complexity, which is their sum, cut at 1."""

    tokens: float = 0.15
    """Length of the conversation."""
    code: float = 0.3
    """Code in it, or asked for."""
    reasoning: float = 0.5
    """Proof, analysis, comparison, planning, calculation, constraints."""
    tools: float = 0.25
    """Tools defined, called and answered."""
    turns: float = 0.1
    """Turns of the conversation."""
    question: float = 0.5
    """The shape of the last message: its length, requirements, several questions, numbers and lists."""
    simple: float = 0.3
    """Taken off for greetings, thanks, look-ups, translations, summaries and extractions."""


@dataclass(slots=True, frozen=True, kw_only=True)
class AutoTerms:
    """The constants behind the section `routing.auto`."""

    weights: ComplexityWeights = ComplexityWeights()
    tokens_full: int = 2048
    """Prompt tokens that count as long: the whole of `weights.tokens`."""
    turns_full: int = 8
    """Turns that count as many."""
    text_chars_max: int = 8192
    """Characters of a request's text that are looked at: of the last user message first, then of those before
    it."""


class ComplexityRouter:
    """Chooses among the models of `routing.auto`."""

    __slots__ = ("_bounds", "_least", "_models", "_terms")

    def __init__(self, auto: Sequence[AutoModel], terms: AutoTerms = AutoTerms()) -> None:
        assert auto, "without models there is no auto"
        self._terms = terms
        self._models = [model.model for model in auto]
        self._bounds = [*(model.up_to for model in auto[:-1]), 1.0]
        self._least = {tier: i for i, model in enumerate(auto) for tier in model.tiers}

    def choose(self, features: Features, may: Callable[[str], bool]) -> ComplexityChoice | None:
        """The model for a request, among those that `may` answer it; None if none may.

        `may` knows what the caller is allowed, and whether the model has the tools and the context. If the
        one that fits best may not, the next larger one is taken, else the next smaller.
        """
        parts = self.parts(features)
        complexity = min(1.0, max(0.0, sum(value for _, value in parts)))
        best = next(i for i, bound in enumerate(self._bounds) if complexity <= bound)
        best = max(best, self._least.get(features.tier, 0))
        order = [*range(best, len(self._models)), *range(best - 1, -1, -1)]
        for place, i in enumerate(order):
            if may(self._models[i]):
                passed_over = tuple(self._models[other] for other in order[:place])
                return ComplexityChoice(self._models[i], complexity, parts, passed_over)
        return None

    def parts(self, features: Features) -> tuple[tuple[str, float], ...]:
        """The amount that each mark adds, largest first. O(`text_chars_max`)."""
        terms, weights = self._terms, self._terms.weights
        last = features.texts[-1][: terms.text_chars_max] if features.texts else ""
        before = _before(features.texts, terms.text_chars_max - len(last))
        instruction = instruction_of(last)
        words = words_of(instruction)
        everything = f"{before}\n{last}"
        num_tokens = features.num_chars / _CHARS_PER_TOKEN
        reasoning = reasoning_mark(instruction, words)
        found = {
            "tokens": weights.tokens * min(1.0, num_tokens / terms.tokens_full),
            "code": weights.code * code_mark(everything, words_of(everything.lower())),
            "reasoning": weights.reasoning * reasoning,
            "tools": weights.tools * tools_mark(features.num_tools, features.num_tool_results),
            "turns": weights.turns * min(1.0, max(0, len(features.texts) - 1) / terms.turns_full),
            "question": weights.question * question_mark(instruction, words),
            # A simple task that is argued about is not simple any more.
            "simple": -weights.simple * simple_mark(instruction, words) * (1 - reasoning),
        }
        shown = [(name, value) for name, value in found.items() if abs(value) >= 0.005]
        return tuple(sorted(shown, key=lambda part: (-abs(part[1]), part[0])))


def _before(texts: Sequence[str], room: int) -> str:
    """The end of the earlier messages, as much as there is room for."""
    kept: list[str] = []
    for text in reversed(texts[:-1]):
        if room <= 0:
            break
        kept.append(text[-room:])
        room -= len(kept[-1])
    return "\n".join(reversed(kept))
