"""Log-probabilities in OpenAI's two forms. Bytes of tokens put together are the text's, split characters included."""

from collections.abc import Sequence
from typing import Any

from mirrorsd.server.answers.shown import Placed
from mirrorsd.server.bundles.loaded import LoadedBundle


def chat_logprobs(bundle: LoadedBundle, tokens: Sequence[Placed]) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of chat."""
    found = []
    for placed in tokens:
        logprob = placed.token.logprob
        assert logprob is not None
        top = [_entry(bundle, token, value) for token, value in logprob.top]
        found.append(_entry(bundle, placed.token.id, logprob.value) | {"top_logprobs": top})
    return found


def _entry(bundle: LoadedBundle, token: int, value: float) -> dict[str, Any]:
    raw = bundle.tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": value}


def completion_logprobs(bundle: LoadedBundle, tokens: Sequence[Placed]) -> dict[str, Any]:
    """`choices[].logprobs` of completions; `text_offset` counts characters of the answer.

    The chosen token is among the best ones' values in any case, as OpenAI promises.
    """
    texts, values, tops = [], [], []
    for placed in tokens:
        logprob = placed.token.logprob
        assert logprob is not None
        texts.append(_text(bundle, placed.token.id))
        values.append(logprob.value)
        best = {_text(bundle, token): value for token, value in reversed(logprob.top)}
        tops.append({texts[-1]: logprob.value, **best})
    offsets = [placed.offset for placed in tokens]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _text(bundle: LoadedBundle, token: int) -> str:
    return str(bundle.tokenizer.token_bytes(token).decode("utf-8", "replace"))
