"""Documents that bind made-up names to made-up values and ask for them later.

Nothing in the weights can answer these: the model has to carry the binding in its state or look it up in its context.
One word in sixteen (by a checksum) is never used in training, so that a test can ask about words never seen.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable

from scripts.build_nano.documents import END_OF_TEXT, UNWANTED, Document, Part, conversation_parts, document

ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sm sn st sw t th tr v w y z"
).split()
VOWELS = "a a a e e e i i i o o o u u ai ea ee ia oa oo ou y".split()
CODAS = [""] * 5 + ("b ck d ff g k l ll m n nd ng nt p r rd rk s sh ss st t th v x z rn lt mp").split()

# (statement, question); {n} is the name and {v} the value.
RELATIONS = [
    ("The code of {n} is {v}.", "What is the code of {n}?"),
    ("The code for {n} is {v}.", "What is the code for {n}?"),
    ("The password of {n} is {v}.", "What is the password of {n}?"),
    ("The password for {n} is {v}.", "What is the password for {n}?"),
    ("{n}'s password is {v}.", "What is {n}'s password?"),
    ("The secret word of {n} is {v}.", "What is the secret word of {n}?"),
    ("The key of {n} is {v}.", "What is the key of {n}?"),
    ("The name of {n} is {v}.", "What is the name of {n}?"),
    ("The colour of {n} is {v}.", "What is the colour of {n}?"),
    ("The number of {n} is {v}.", "What is the number of {n}?"),
    ("The value of {n} is {v}.", "What is the value of {n}?"),
    ("The friend of {n} is {v}.", "Who is the friend of {n}?"),
    ("{n}'s friend is {v}.", "Who is {n}'s friend?"),
    ("{n}'s favourite word is {v}.", "What is {n}'s favourite word?"),
    ("The pet of {n} is called {v}.", "What is the pet of {n} called?"),
    ("{n} lives in {v}.", "Where does {n} live?"),
    ("{n} works in {v}.", "Where does {n} work?"),
    ("{n} comes from {v}.", "Where does {n} come from?"),
    ("{n} is called {v}.", "What is {n} called?"),
    ("{n} likes {v}.", "What does {n} like?"),
    ("{n} has a {v}.", "What does {n} have?"),
    ("{n} means {v}.", "What does {n} mean?"),
    ("The word {n} means {v}.", "What does the word {n} mean?"),
    ("{n} is {v}.", "What is {n}?"),
    ("{n}: {v}.", "{n}?"),
    ("{n} = {v}.", "{n} = ?"),
    ("{n} -> {v}.", "{n} -> ?"),
    ("The capital of {n} is {v}.", "What is the capital of {n}?"),
]
OPENINGS = ["Remember this:", "Please remember:", "Note:", "Some facts:", "Learn this."]
ANSWER = 1.5
"""Loss weight of an answer."""
NOISE = 0.02
"""Loss weight of a made-up word where it first appears."""
FRAME = 0.3
"""Loss weight of the words around names and values."""


def is_held_out(word: str) -> bool:
    """Whether training never uses this made-up word."""
    return zlib.crc32(word.lower().encode()) % 16 == 0


def made_up_word(rng: random.Random, *, held_out: bool = False) -> str:
    """A pronounceable word of two or three syllables, capitalised half of the time."""
    while True:
        syllables = rng.choice([1, 2, 2, 2, 2, 3])
        word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables))
        if 4 <= len(word) <= 12 and is_held_out(word) == held_out and not UNWANTED.search(word):
            return word.capitalize() if rng.random() < 0.7 else word


def made_up_value(rng: random.Random, *, held_out: bool = False) -> str:
    """A made-up word, sometimes a number of two to five digits or two words."""
    roll = rng.random()
    if roll < 0.15:
        return str(rng.randint(10, 10 ** rng.randint(2, 5) - 1))
    if roll < 0.22:
        return f"{made_up_word(rng, held_out=held_out)} {made_up_word(rng, held_out=held_out)}"
    return made_up_word(rng, held_out=held_out)


@dataclasses.dataclass(frozen=True)
class Binding:
    """A name, its value, and how the sentence between them goes."""

    name: str
    value: str
    relation: tuple[str, str]

    def stated(self, *, asked: bool) -> list[Part]:
        """The sentence; `asked` when the binding has been given before, so that the value can be predicted."""
        before, after = self.relation[0].split("{v}")
        head, tail = before.split("{n}")
        return [
            (head, FRAME),
            (self.name, NOISE),
            (tail.rstrip(), FRAME),
            (" " * (len(tail) - len(tail.rstrip())) + self.value, ANSWER if asked else NOISE),
            (after, 1.0 if asked else FRAME),
        ]

    def question(self) -> list[Part]:
        before, after = self.relation[1].split("{n}")
        return [(before, FRAME), (self.name, NOISE), (after, FRAME)]


def make_bindings(rng: random.Random, count: int, *, held_out: bool = False) -> list[Binding]:
    """Bindings of distinct names; a third of the time all of one relation."""
    shared = rng.choice(RELATIONS) if rng.random() < 0.35 else None
    names: set[str] = set()
    while len(names) < count:
        names.add(made_up_word(rng, held_out=held_out))
    return [
        Binding(name, made_up_value(rng, held_out=held_out), shared or rng.choice(RELATIONS))
        for name in sorted(names)
    ]


def _short_answer(binding: Binding, rng: random.Random) -> list[Part]:
    if rng.random() < 0.6:
        return binding.stated(asked=True)
    return [(binding.value, ANSWER), "."]


def recall_document(rng: random.Random, filler: Callable[[random.Random], str], progress: float) -> Document:
    """A document of bindings, perhaps filler, and questions.

    Args:
        rng: source of every choice.
        filler: draws one unrelated sentence.
        progress: from 0 to 1; early documents are short and dense, later ones have up to 1,050 characters of filler.
    """
    long_form = rng.random() < 0.15 + 0.45 * progress
    if long_form:
        count = rng.choice([1, 1, 1, 2, 2, 3, 4, 5])
        filler_characters = rng.randint(50, int(300 + 750 * progress))
    else:
        count = rng.randint(2, 4 + int(4 * progress))
        filler_characters = 0
    bindings = make_bindings(rng, count)
    separator = rng.choice([" ", " ", "\n"])

    given: list[Part] = []
    if rng.random() < 0.3:
        given += [(rng.choice(OPENINGS), FRAME), separator]
    lead = rng.randint(0, filler_characters // 4)
    given += _filler(rng, filler, lead, separator)
    for index, binding in enumerate(bindings):
        given += [*binding.stated(asked=False), (separator, FRAME)]
        if not long_form and index and rng.random() < 0.3:
            given += [*rng.choice(bindings[: index + 1]).stated(asked=True), (separator, FRAME)]
    given += _filler(rng, filler, filler_characters - lead, separator)

    asked = list(bindings) if long_form else rng.choices(bindings, k=rng.randint(count, 2 * count))
    rng.shuffle(asked)
    roll = rng.random()
    if roll < 0.3:
        given = given[:-1]
        turns = []
        for index, binding in enumerate(asked[:4]):
            context = [*given, (separator, FRAME)] if index == 0 else []
            turns.append(([*context, *binding.question()], _short_answer(binding, rng)))
        if rng.random() < 0.3:
            turns = [
                (given, ["I will remember it."]),
                (turns[0][0][len(given) + 1 :], turns[0][1]),
                *turns[1:],
            ]
        return document(*conversation_parts(turns))
    parts = given
    for index, binding in enumerate(asked):
        if index:
            parts.append((separator, FRAME))
        form = rng.random()
        if roll < 0.75 or form < 0.3:
            parts += binding.stated(asked=True)
        elif form < 0.65:
            parts += [
                ("Question: ", FRAME),
                *binding.question(),
                ("\nAnswer:", FRAME),
                (f" {binding.value}", ANSWER),
                ".",
            ]
        else:
            parts += [
                ("Q: ", FRAME),
                *binding.question(),
                ("\nA:", FRAME),
                (f" {binding.value}", ANSWER),
                ".",
            ]
    return document(*parts, END_OF_TEXT)


def copying_document(rng: random.Random, words: Callable[[random.Random], str]) -> Document:
    """Unrelated words, then the same again once to three times, in order or pair by pair in another order.

    Nothing is easier to get right by looking back, and half of the tokens ask for it: it is how the model starts to
    look back at all.

    Args:
        rng: source of every choice.
        words: draws one word of the language; made-up words and digits are mixed in.
    """
    size = rng.choice([1, 2, 2, 3, 4])
    groups = []
    for _ in range(rng.randint(2, 12 // size + 2)):
        drawn = [
            rng.choice([made_up_word, words, words, lambda rng: str(rng.randint(0, 99))])(rng)
            for _ in range(size)
        ]
        groups.append(" ".join(drawn))
    end = rng.choice([".", ",", ";", "\n", ""])
    parts: list[Part] = []
    for copy in range(rng.randint(2, 4)):
        if size > 1 and copy and rng.random() < 0.5:
            rng.shuffle(groups)
        for group in groups:
            text = f" {group}{end}" if parts else f"{group}{end}"
            first, _, rest = text[1:].partition(" ")
            asked = ANSWER if copy else NOISE
            parts += [(text[:1] + first, asked / 2), (f" {rest}", asked)] if rest else [(text, asked)]
    return document(*parts, END_OF_TEXT)


def _filler(
    rng: random.Random, filler: Callable[[random.Random], str], characters: int, separator: str
) -> list[Part]:
    parts: list[Part] = []
    while characters > 0:
        sentence = filler(rng)
        parts += [(sentence, FRAME), (separator, FRAME)]
        characters -= len(sentence) + 1
    return parts
