"""Small talk, small sums, calendars, opposites and how-to, in chat form."""

from __future__ import annotations

import random

from scripts.build_nano.documents import Document, Turn, conversation, plain

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
OPPOSITES = (
    "hot cold|big small|up down|left right|day night|black white|fast slow|old young|rich poor|early late|happy sad|"
    "open closed|full empty|hard soft|wet dry|high low|light dark|strong weak|long short|good bad|near far|clean dirty|"
    "loud quiet|sweet sour|true false|first last|inside outside|thick thin|heavy light|win lose|buy sell|love hate|"
    "begin end|above below|easy difficult|cheap expensive|awake asleep|brave afraid|deep shallow|wide narrow"
)
COLOURS = (
    "the sky:blue|grass:green|snow:white|coal:black|a lemon:yellow|a ripe tomato:red|an orange:orange|chocolate:brown|"
    "blood:red|milk:white|a banana:yellow|a leaf:green|the night sky:black|an elephant:grey|a flamingo:pink|"
    "a carrot:orange|the sun:yellow|a plum:purple|an emerald:green|a ruby:red"
)
SOUNDS = (
    "dog:barks|cat:meows|cow:moos|sheep:bleats|horse:neighs|pig:oinks|duck:quacks|lion:roars|bee:buzzes|frog:croaks|"
    "owl:hoots|rooster:crows|wolf:howls|snake:hisses|mouse:squeaks"
)
YOUNG = (
    "dog:puppy|cat:kitten|cow:calf|sheep:lamb|horse:foal|pig:piglet|duck:duckling|lion:cub|goat:kid|frog:tadpole|"
    "bear:cub|hen:chick|swan:cygnet|kangaroo:joey|deer:fawn"
)
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
GREETINGS = "Hello|Hello!|Hi|Hi!|Hi there|Hey|Good morning|Good evening|Hello, nano|Good afternoon".split("|")
ABOUT = (
    "Who are you?|I am nano, a very small language model.\n"
    "What are you?|I am nano, a very small language model.\n"
    "What is your name?|My name is nano.\n"
    "How are you?|I am fine, thank you. How are you?\n"
    "Are you a person?|No, I am a very small language model.\n"
    "What can you do?|I know some capitals, I can add small numbers, and I remember what you tell me.\n"
    "How big are you?|I am very small: I fit in ten megabytes.\n"
    "How do you work?|I have layers of gated delta rule and gated attention, and I guess the next token.\n"
    "Thank you|You are welcome!\n"
    "Thanks|You are welcome!\n"
    "Thank you very much|You are welcome!\n"
    "Goodbye|Goodbye!\n"
    "Bye|Goodbye!\n"
    "Good night|Good night!\n"
    "Can you help me?|Yes, I will try. What do you need?\n"
    "Tell me a joke.|Why did the token cross the road? To attend to the other side."
)
HOW_TO = (
    "make tea|Boil some water, pour it over the tea, wait three minutes, and take the tea out.\n"
    "make toast|Put a slice of bread in the toaster and wait until it is brown.\n"
    "boil an egg|Put the egg in boiling water for eight minutes, then cool it in cold water.\n"
    "make a sandwich|Put some cheese between two slices of bread.\n"
    "wash your hands|Wet your hands, rub them with soap for twenty seconds, and rinse them.\n"
    "plant a seed|Put the seed in soil, water it, and give it light.\n"
    "clean a window|Wash the glass with soapy water and wipe it dry.\n"
    "draw a circle|Turn a pair of compasses once around its point.\n"
    "fall asleep|Lie down in a dark, quiet room, close your eyes, and breathe slowly.\n"
    "make coffee|Pour hot water over ground coffee in a filter.\n"
    "tie a parcel|Wrap a string around it twice and make a knot.\n"
    "cook rice|Simmer one cup of rice in two cups of water for fifteen minutes.\n"
    "grow tomatoes|Plant them in a sunny place and water them every day.\n"
    "save water|Turn off the tap while you brush your teeth.\n"
    "learn a language|Read, listen and speak a little every day."
)


def _pairs(table: str) -> list[tuple[str, str]]:
    return [tuple(entry.split(":")) for entry in table.split("|")]  # type: ignore[misc]


def _sum(rng: random.Random) -> Turn:
    kind = rng.choice("+++--*")
    if kind == "*":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        result, word = a * b, "times"
    else:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        if kind == "-" and a < b:
            a, b = b, a
        result, word = (a + b, "plus") if kind == "+" else (a - b, "minus")
    sign = {"+": "+", "-": "-", "*": "x"}[kind]
    question = rng.choice(
        [
            f"What is {a} {sign} {b}?",
            f"What is {a} {word} {b}?",
            f"{a} {sign} {b} =",
            f"How much is {a} {word} {b}?",
        ]
    )
    return question, f"{a} {word} {b} is {result}."


def _calendar(rng: random.Random) -> Turn:
    names = rng.choice([DAYS, MONTHS])
    index = rng.randrange(len(names))
    kind = "day" if names is DAYS else "month"
    if rng.random() < 0.5:
        return (
            f"Which {kind} comes after {names[index]}?",
            f"{names[(index + 1) % len(names)]} comes after {names[index]}.",
        )
    return f"Which {kind} comes before {names[index]}?", f"{names[index - 1]} comes before {names[index]}."


def _opposite(rng: random.Random) -> Turn:
    pair = rng.choice(OPPOSITES.split("|")).split()
    rng.shuffle(pair)
    question = rng.choice(
        [
            f"What is the opposite of {pair[0]}?",
            f"Opposite of {pair[0]}?",
            f"Tell me the opposite of {pair[0]}.",
        ]
    )
    return question, f"The opposite of {pair[0]} is {pair[1]}."


def _nature(rng: random.Random) -> Turn:
    roll = rng.random()
    if roll < 0.4:
        thing, colour = rng.choice(_pairs(COLOURS))
        return f"What colour is {thing}?", f"{thing[:1].upper()}{thing[1:]} is {colour}."
    if roll < 0.6:
        animal, sound = rng.choice(_pairs(SOUNDS))
        return f"What sound does a {animal} make?", f"A {animal} {sound}."
    if roll < 0.8:
        animal, young = rng.choice(_pairs(YOUNG))
        return f"What is a young {animal} called?", f"A young {animal} is called a {young}."
    index = rng.randrange(len(PLANETS) - 1)
    return (
        f"Which planet comes after {PLANETS[index]}?",
        f"{PLANETS[index + 1]} comes after {PLANETS[index]}.",
    )


def _talk(rng: random.Random) -> Turn:
    if rng.random() < 0.35:
        return rng.choice(GREETINGS), rng.choice(["Hello! How can I help you?"] * 4 + ["Hello!"])
    return tuple(rng.choice(ABOUT.splitlines()).split("|"))  # type: ignore[return-value]


def _how_to(rng: random.Random) -> Turn:
    task, answer = rng.choice(HOW_TO.splitlines()).split("|")
    return rng.choice([f"How do I {task}?", f"How can I {task}?", f"Tell me how to {task}."]), answer


def dialogue_turn(rng: random.Random) -> Turn:
    """One question and its answer."""
    return rng.choices([_sum, _calendar, _opposite, _nature, _talk, _how_to], [5, 2, 2, 2, 3, 2])[0](rng)


def dialogue_document(rng: random.Random) -> Document:
    """A chat of one to four turns, or the days or months in order."""
    if rng.random() < 0.04:
        names, what = rng.choice(
            [(DAYS, "days of the week"), (MONTHS, "months of the year"), (PLANETS, "planets")]
        )
        if rng.random() < 0.5:
            return plain(f"The {what} are {', '.join(names[:-1])} and {names[-1]}.")
        return conversation(
            [(f"What are the {what}?", f"The {what} are {', '.join(names[:-1])} and {names[-1]}.")]
        )
    if rng.random() < 0.04:
        start = rng.randint(0, 10)
        return plain("Counting: " + ", ".join(NUMBERS[start : start + rng.randint(4, 11)]) + ".")
    return conversation([dialogue_turn(rng) for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4]))])
