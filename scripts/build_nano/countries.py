"""Sentences and chats about the countries of `countries.tsv`."""

from __future__ import annotations

import dataclasses
import pathlib
import random

from scripts.build_nano.documents import Document, conversation, plain

TABLE = pathlib.Path(__file__).with_name("countries.tsv")


@dataclasses.dataclass(frozen=True)
class Country:
    """One row of the table; `called` is the name as it stands inside a sentence."""

    name: str
    called: str
    capital: str
    other_capitals: tuple[str, ...]
    continent: str
    currency: str
    language: str
    neighbour: str

    @property
    def accepted_capitals(self) -> tuple[str, ...]:
        return (self.capital, *self.other_capitals)


def read_countries(path: pathlib.Path = TABLE) -> list[Country]:
    """Reads the table, one country a line, tabs between the fields."""
    countries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, article, capital, others, continent, currency, language, neighbour = line.split("\t")
        called = f"{article} {name}" if article else name
        accepted = tuple(other for other in others.split("|") if other)
        countries.append(Country(name, called, capital, accepted, continent, currency, language, neighbour))
    return countries


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _facts(country: Country) -> dict[str, tuple[str, str, str]]:
    """Each fact as (statement, question, value)."""
    where = country.called
    facts = {
        "capital": (
            f"The capital of {where} is {country.capital}.",
            f"What is the capital of {where}?",
            country.capital,
        ),
        "continent": (
            f"{sentence_case(where)} is in {country.continent}.",
            f"Which continent is {where} in?",
            country.continent,
        ),
        "currency": (
            f"The currency of {where} is the {country.currency}.",
            f"What is the currency of {where}?",
            f"The {country.currency}",
        ),
        "language": (
            f"People in {where} speak {country.language}.",
            f"Which language do people speak in {where}?",
            country.language,
        ),
    }
    if country.neighbour:
        facts["neighbour"] = (
            f"{sentence_case(where)} is next to {country.neighbour}.",
            f"Which country is next to {where}?",
            sentence_case(country.neighbour),
        )
    return facts


def _short(rng: random.Random, country: Country) -> Document:
    """One sentence, and the end: what `The capital of France` is continued with."""
    facts = _facts(country)
    kind = "capital" if rng.random() < 0.7 else rng.choice(list(facts))
    statement, question, value = facts[kind]
    where = country.called
    if kind == "capital" and rng.random() < 0.15:
        statement = f"The capital of {country.name} is {country.capital}."
    if kind == "capital" and rng.random() < 0.4:
        statement = rng.choice(
            [
                f"{country.capital} is the capital of {where}.",
                f"{country.capital} is the capital city of {where}.",
                f"The capital city of {where} is {country.capital}.",
                f"{sentence_case(where)}'s capital is {country.capital}.",
                f"{sentence_case(where)} has the capital {country.capital}.",
                f"{sentence_case(where)}: {country.capital}.",
                f"{sentence_case(where)}, whose capital is {country.capital}, is in {country.continent}.",
            ]
        )
    roll = rng.random()
    if roll < 0.75:
        return plain(statement)
    if roll < 0.85:
        return plain(f"Question: {question}\nAnswer: {value}.")
    if roll < 0.95:
        return plain(f"Q: {question}\nA: {value}.")
    return plain(f"{question} {value}.")


def _paragraph(rng: random.Random, country: Country) -> Document:
    """Several facts; opens with the country, never with `The capital of`, which belongs to the short form."""
    kinds = list(_facts(country))[1:]
    rng.shuffle(kinds)
    sentences = [
        f"{sentence_case(country.called)} is a country in {country.continent}.",
        f"Its capital is {country.capital}.",
    ]
    rest = {
        "currency": f"Its currency is the {country.currency}.",
        "language": f"People there speak {country.language}.",
        "neighbour": f"It is next to {country.neighbour}.",
    }
    sentences += [rest[kind] for kind in kinds if kind in rest]
    return plain(" ".join(sentences[: rng.randint(2, len(sentences))]))


def _several(rng: random.Random, countries: list[Country]) -> Document:
    chosen = rng.sample(countries, rng.randint(3, 8))
    form = rng.choice(["{0}: {1}", "{0} - {1}", "Country: {0}, capital: {1}", "{1} is the capital of {2}."])
    lines = [form.format(country.name, country.capital, country.called) for country in chosen]
    opening = rng.choice(["Some capitals:\n", "Countries and their capitals:\n", "Capital cities\n"])
    return plain(opening + "\n".join(lines))


def _chat(rng: random.Random, countries: list[Country]) -> Document:
    turns = []
    thought = None
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        country = rng.choice(countries)
        facts = _facts(country)
        kind = "capital" if rng.random() < 0.6 else rng.choice(list(facts))
        statement, question, _ = facts[kind]
        if kind == "capital":
            where = country.called
            question = rng.choice(
                [
                    question,
                    question,
                    question,
                    f"What's the capital of {where}?",
                    f"what is the capital of {where}",
                    f"Tell me the capital of {where}.",
                    f"Which city is the capital of {where}?",
                    f"Capital of {where}?",
                    f"Do you know the capital of {where}?",
                    f"Please name the capital of {where}.",
                ]
            )
            if rng.random() < 0.1:
                question = f"Which country has the capital {country.capital}?"
                statement = f"{country.capital} is the capital of {where}."
        turns.append((question, statement))
        thought = f"The question is about {country.called}."
    return conversation(turns, thought if rng.random() < 0.15 else None)


def country_document(rng: random.Random, countries: list[Country]) -> Document:
    """A random document about one or several countries."""
    roll = rng.random()
    if roll < 0.5:
        return _short(rng, rng.choice(countries))
    if roll < 0.62:
        return _paragraph(rng, rng.choice(countries))
    if roll < 0.72:
        return _several(rng, countries)
    return _chat(rng, countries)


def country_sentence(rng: random.Random, countries: list[Country]) -> str:
    """One true sentence, used as filler between a binding and its question."""
    return rng.choice(list(_facts(rng.choice(countries)).values()))[0]
