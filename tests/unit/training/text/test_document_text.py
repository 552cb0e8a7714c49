"""Documents as tokens to train on: whole, in the target's own form, each once."""

from pathlib import Path

from mirrorsd.training.text.corpus import Document
from mirrorsd.training.text.document_text import document_tokens
from mirrorsd.training.text.self_prompts import load_tokenizer

END = 5


def test_documents_are_rendered_whole_and_kept_apart(tiny_pair: tuple[Path, Path]) -> None:
    tokenizer = load_tokenizer(tiny_pair[0])
    chat = ({"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A fox."})
    documents = [Document("Once upon a time."), Document(messages=chat), Document("The end.")]
    found = document_tokens(documents, tokenizer, END).tolist()
    plain = [[*tokenizer(document.text)["input_ids"], END] for document in documents if document.text]
    rendered = list(tokenizer.apply_chat_template(list(chat))["input_ids"])
    parts = [*plain, rendered]
    assert len(found) == sum(map(len, parts))
    joined = ",".join(map(str, found))
    assert all(",".join(map(str, part)) in joined for part in parts)
    assert document_tokens(documents, tokenizer, END).tolist() == found, "a resumed training finds the same order"
