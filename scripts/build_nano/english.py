"""Plain English: definitions and example sentences of WordNet 3.0, from Debian's package `wordnet-base`."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re
import subprocess
import tempfile
import zlib

from scripts.build_nano.documents import UNWANTED, Document, conversation, plain

FILES = {"noun": "data.noun", "verb": "data.verb", "adjective": "data.adj", "adverb": "data.adv"}
INSTALLED = pathlib.Path("/usr/share/wordnet")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One sense of a word: its names, what it means, and sentences that use it."""

    words: tuple[str, ...]
    kind: str
    meaning: str
    examples: tuple[str, ...]

    @property
    def is_held_out(self) -> bool:
        """One entry in forty is kept for measuring perplexity."""
        return zlib.crc32(self.meaning.encode()) % 40 == 0


def wordnet_folder() -> pathlib.Path:
    """Where WordNet's files lie: as installed, or unpacked from a download of Debian's package.

    Raises:
        FileNotFoundError: if the package is not installed and cannot be downloaded.
    """
    if (INSTALLED / "data.noun").exists():
        return INSTALLED
    unpacked = pathlib.Path(tempfile.gettempdir()) / "qwen35-nano-wordnet"
    folder = unpacked / "usr/share/wordnet"
    if not (folder / "data.noun").exists():
        unpacked.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["apt-get", "download", "wordnet-base"], cwd=unpacked, check=True, capture_output=True
            )
            package = next(unpacked.glob("wordnet-base_*.deb"))
            subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError, StopIteration) as error:
            raise FileNotFoundError(
                f"{INSTALLED} has no WordNet and `apt-get download wordnet-base` failed ({error}): "
                "install Debian's package wordnet-base"
            ) from error
    return folder


def read_entries(folder: pathlib.Path) -> list[Entry]:
    """Reads the senses whose definitions are short and in plain letters."""
    counts = _word_counts(folder)
    entries = []
    for kind, file_name in FILES.items():
        for line in (folder / file_name).read_text(encoding="latin-1").splitlines():
            if line.startswith("  ") or " | " not in line:
                continue
            data, gloss = line.split(" | ", 1)
            if UNWANTED.search(line):
                continue
            fields = data.split()
            names = [
                fields[4 + 2 * index].split("(")[0].replace("_", " ") for index in range(int(fields[3], 16))
            ]
            meaning = re.split(r';\s*"', gloss, maxsplit=1)[0]
            meaning = re.sub(r"\([^)]*\)", "", meaning)
            meaning = re.sub(r"\s+", " ", meaning).strip(" ;:,")
            examples = [_sentence(example) for example in re.findall(r'"([^"]+)"', gloss)]
            examples = [example for example in examples if 12 <= len(example) <= 120 and example.isascii()]
            common = max(counts.get(name.lower(), 0) for name in names)
            if not (8 <= len(meaning) <= 110 and meaning.isascii()) or (common < 2 and not examples):
                continue
            entries.append(Entry(tuple(names), kind, meaning, tuple(examples)))
    return entries


def _word_counts(folder: pathlib.Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in (folder / "cntlist.rev").read_text(encoding="latin-1").splitlines():
        sense, _, count = line.split()
        word = sense.split("%")[0].replace("_", " ")
        counts[word] = counts.get(word, 0) + int(count)
    return counts


def _sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text[-1:] in ".!?" else f"{text}."


def english_sentence(rng: random.Random, entries: list[Entry]) -> str:
    """An example sentence or a definition."""
    entry = rng.choice(entries)
    if entry.examples:
        return rng.choice(entry.examples)
    return _sentence(f"{rng.choice(entry.words)}: {entry.meaning}")


def english_document(rng: random.Random, entries: list[Entry]) -> Document:
    """A dictionary entry, a few example sentences, or a question about a word."""
    roll = rng.random()
    entry = rng.choice(entries)
    if roll < 0.35 or not entry.examples:
        word, *synonyms = entry.words
        others = f" ({', '.join(synonyms)})" if synonyms and rng.random() < 0.5 else ""
        text = f"{word}{others}, {entry.kind}: {entry.meaning}."
        if entry.examples:
            text += " " + " ".join(entry.examples)
        return plain(text)
    if roll < 0.45:
        word = rng.choice(entry.words)
        return conversation([(f'What does "{word}" mean?', _sentence(entry.meaning))])
    if roll < 0.5:
        word = rng.choice(entry.words)
        return conversation([(f'Use "{word}" in a sentence.', rng.choice(entry.examples))])
    return plain(" ".join(english_sentence(rng, entries) for _ in range(rng.randint(2, 6))))
