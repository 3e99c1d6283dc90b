"""From records to pairs: which tokens are answers, and what is skipped and counted."""

from __future__ import annotations

import pytest

from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.training.chat_spans import ChatDocuments
from qwen35_jax.training.document import Document
from qwen35_jax.training.preference.dataset import PreferenceDataset, make_preference_dataset
from qwen35_jax.training.preference.records import Comparison
from qwen35_jax.training.records import Chat, Completion, DataError, Record, Text

TOKENIZER = Tokenizer.from_folder(find_model("nano"))
CHATS = ChatDocuments(ChatTemplate.from_folder(find_model("nano")), TOKENIZER)
END = "<|endoftext|>"


def turn(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}


PROMPT = [
    turn("user", "Hi"),
    turn("assistant", "Hello.", reasoning_content="greet"),
    turn("user", "2 + 2?"),
]


def dataset(*contents: Comparison, row_length: int = 300) -> PreferenceDataset:
    records = [Record(f"pairs.jsonl, line {number}", content) for number, content in enumerate(contents, 1)]
    return make_preference_dataset(records, TOKENIZER, CHATS, row_length=row_length)


def texts(chosen: str, rejected: str, prompt: str = "2 + 2 =") -> Comparison:
    return Comparison(Completion(prompt, chosen), Completion(prompt, rejected))


def chats(chosen: list, rejected: list) -> Comparison:
    return Comparison(Chat(PROMPT + chosen, None), Chat(PROMPT + rejected, None), len(PROMPT))


def learned(document: Document) -> str:
    return TOKENIZER.decode(document.tokens[document.trained].tolist(), skip_special_tokens=False)


def test_the_tokens_of_answers_are_trained_and_not_the_turns_of_the_assistant_before_them() -> None:
    ((chosen, rejected),), summary = dataset(
        chats(
            [turn("assistant", "4")], [turn("assistant", "5"), turn("user", "Sure?"), turn("assistant", "4")]
        )
    )
    assert learned(chosen) == "4<|im_end|>"
    assert learned(rejected) == "5<|im_end|>4<|im_end|>"
    whole = CHATS.encode([*PROMPT, turn("assistant", "4")])
    assert chosen.tokens.tolist() == whole.tokens.tolist()
    assert learned(whole) == "Hello.<|im_end|>4<|im_end|>"
    assert (summary.pairs, summary.tokens) == (1, len(chosen.tokens) + len(rejected.tokens))
    assert summary.trained_tokens == chosen.trained.sum() + rejected.trained.sum()


def test_b83_of_texts_the_answer_and_its_stop_token_are_trained() -> None:
    ((chosen, rejected),), _ = dataset(texts(" 4", " 5"))
    assert (learned(chosen), learned(rejected)) == (f" 4{END}", f" 5{END}")


def test_of_whole_texts_what_both_begin_with_is_the_prompt() -> None:
    ((chosen, rejected),), _ = dataset(Comparison(Text("Q: 2 + 2? A: 4, surely"), Text("Q: 2 + 2? A: 5")))
    assert learned(chosen).endswith(f"4, surely{END}")
    assert learned(rejected).endswith(f"5{END}")
    known = len(chosen.trained) - chosen.trained.sum()
    assert chosen.tokens[:known].tolist() == rejected.tokens[:known].tolist()
    assert chosen.tokens[known] != rejected.tokens[known]
    assert not rejected.trained[:known].any()
    assert chosen.trained[known:].all()


def test_what_teaches_nothing_is_skipped_and_counted_with_its_first_line() -> None:
    good = texts(" 4", " 5")
    pairs, summary = dataset(
        good,
        texts(" 4", " \n"),
        chats([turn("assistant", "4")], [turn("assistant", " ")]),
        Comparison(Chat(PROMPT, None), Chat([*PROMPT, turn("assistant", "4")], None), len(PROMPT)),
        texts(" 4", " 4"),
        chats([turn("assistant", "4")], [turn("assistant", "4")]),
        texts(" 4", " four" * 300),
        chats([turn("user", "And?")], [turn("assistant", "4")]),
        good,
    )
    assert len(pairs) == summary.pairs == 2
    counts = {
        name: (tally.count, tally.first.rpartition(" ")[2])
        for name, tally in vars(summary).items()
        if not isinstance(tally, int)
    }
    assert counts == {
        "empty_answers": (3, "2"),
        "identical": (2, "5"),
        "dropped": (1, "7"),
        "untrained": (1, "8"),
    }
    assert str(summary) == (
        f"2 pairs of 9 records, {summary.trained_tokens} of {summary.tokens} tokens are of answers; "
        "1 dropped as longer than a row (first: pairs.jsonl, line 7); "
        "3 skipped for an empty answer (first: pairs.jsonl, line 2); "
        "2 skipped with two answers that are the same (first: pairs.jsonl, line 5); "
        "1 skipped with nothing to train (first: pairs.jsonl, line 8)"
    )


def test_a_pair_fits_a_row_if_both_documents_do_together() -> None:
    ((chosen, rejected),), _ = dataset(texts(" 4", " 5"))
    length = len(chosen.tokens) + len(rejected.tokens)
    assert len(dataset(texts(" 4", " 5"), row_length=length).pairs) == 1
    with pytest.raises(DataError, match=r"no pair to learn from: 0 pairs of 1 records.*longer than a row"):
        dataset(texts(" 4", " 5"), row_length=length - 1)


def test_a_chat_that_the_template_refuses_is_named() -> None:
    late = turn("system", "Be brief.")
    with pytest.raises(DataError, match=r"pairs.jsonl, line 2: .*A system message must come first"):
        dataset(texts(" 4", " 5"), chats([turn("assistant", "4")], [turn("assistant", "5"), late]))
