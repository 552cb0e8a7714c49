"""What a pair said about texts, position by position: enough to fit root scores and to replay the scheduler.

Owns the arrays and their file. Does not own making them (`recorder`), fitting (`score_fitting`), replaying (`replay`).
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.documents import build
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import Head
from mirrorsd.graphs.whole_file import whole_file
from mirrorsd.runtime.sampling.noise import NOISE

_FORMAT = "mirrorsd-recording-1"
_HEAD_ARRAYS = ("head_ids", "head_logprobs")
_ARRAYS = ("tokens", "draft_ids", "draft_logprobs", "exit_ids", "exit_logprobs", "windows")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedText:
    """One text by the target, and what draft and exits said at each of its `P` new tokens.

    Head `h` stands at position `num_prompt - 1 + h`; its window is what the draft goes on with, token by token. A
    text of prompt `[5, 6]` and new tokens `[7, 8, 9]` has three heads: the tokens 6, 7 and 8.

    Attributes:
        tokens: `[n]` prompt and new tokens.
        num_prompt: tokens of the prompt.
        seed: of the noise, where the text was sampled.
        windows: `[P, D]` the draft's own continuation of the text up to each head.
        draft_ids: `[P, D + 1, 1 + s, m]` what the draft says after the head (`[:, 0]`) and after each window token.
        draft_logprobs: the same shape.
        exit_ids: `[E, P, D + 1, K]` what every exit says at the same rows.
        exit_logprobs: the same shape.
        head_ids: `[P, K, m]` by kind, what a head guesses behind each head token; -1 where there was no row to read.
        head_logprobs: the same shapes.
        ends: whether the target ended it: nobody knew before that this token would be the last.
    """

    tokens: NDArray[np.int64]
    num_prompt: int
    seed: int
    windows: NDArray[np.int64]
    draft_ids: NDArray[np.int64]
    draft_logprobs: NDArray[np.float32]
    exit_ids: NDArray[np.int64]
    exit_logprobs: NDArray[np.float32]
    head_ids: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    head_logprobs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    ends: bool = False

    @property
    def num_heads(self) -> int:
        """Positions that were recorded: one per new token."""
        return int(self.windows.shape[0])

    @property
    def depth(self) -> int:
        """Longest window that can be replayed."""
        return int(self.windows.shape[1])

    def outcome(self, head: int, gamma: int) -> tuple[int, int]:
        """How many of the window's first `gamma` tokens are the text's own, and the text's token after those.

        The window is cut where the text ends, so that there always is a token after it.
        """
        start = self.num_prompt + head
        truth = self.tokens[start : start + gamma + 1]
        window = self.windows[head, : len(truth) - 1]
        wrong = np.flatnonzero(window != truth[: len(window)])
        num_accepted = int(wrong[0]) if len(wrong) else len(window)
        return num_accepted, int(truth[num_accepted])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Texts of one pair, all greedy or all sampled at one temperature.

    Attributes:
        texts: the texts.
        temperature: 0 where greedy.
        layers: depth of every exit, in the order of `exit_ids`.
        num_layers: layers of the target.
        vocab_size: of both models.
        round_sizes: row counts of the draft that are worth filling.
        max_tips: most rows of a draft round.
        heads: whose guesses were recorded.
    """

    texts: tuple[RecordedText, ...]
    temperature: float
    layers: tuple[int, ...]
    num_layers: int
    vocab_size: int
    round_sizes: tuple[int, ...]
    max_tips: int
    heads: tuple[Head, ...] = ()

    def write(self, path: Path) -> None:
        """Keep it as one file in the form of `.npz`, whatever its name ends in.

        Raises:
            OSError: it cannot be written.
        """
        header = {"format": _FORMAT, "noise": NOISE, "temperature": self.temperature, "layers": self.layers}
        header |= {"num_layers": self.num_layers, "vocab_size": self.vocab_size, "max_tips": self.max_tips}
        header |= {
            "round_sizes": self.round_sizes,
            "texts": [[text.num_prompt, text.seed, text.ends] for text in self.texts],
        }
        header |= {"heads": [asdict(head) for head in self.heads]}
        arrays = {"header": np.array(json.dumps(header))}
        for number, text in enumerate(self.texts):
            arrays |= {f"{name}_{number}": _packed(getattr(text, name)) for name in _ARRAYS}
            for name in _HEAD_ARRAYS:
                of_kinds = getattr(text, name).items()
                arrays |= {f"{name}_{kind}_{number}": _packed(values) for kind, values in of_kinds}
        with whole_file(path) as stream:
            np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote; nothing is unpickled.

        Raises:
            ConfigError: no such file, no recording, a damaged one, or one whose texts were sampled with other noise.
        """
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                header = json.loads(str(arrays["header"]))
                if header.pop("format") != _FORMAT:
                    raise KeyError("format")
                _check_noise(path, header.pop("noise", "that of an older version"), header["temperature"])
                heads = tuple(build(Head, head) for head in header.pop("heads", ()))
                kinds = [head.kind for head in heads]
                texts = tuple(
                    _text(arrays, number, of_text, kinds) for number, of_text in enumerate(header.pop("texts"))
                )
                layers, sizes = tuple(header.pop("layers")), tuple(header.pop("round_sizes"))
                return cls(texts=texts, layers=layers, round_sizes=sizes, heads=heads, **header)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error) as error:
            raise ConfigError(
                f"{path} is not a recording, or a damaged one; make one: `mirrorsd simulate BUNDLE --record FILE`."
            ) from error


def _check_noise(path: Path, found: str, temperature: float) -> None:
    """Refuse sampled texts that this version would rank with other noise than they were recorded with."""
    if temperature and found != NOISE:
        raise ConfigError(
            f"{path} was sampled with other noise ({found}) than this version's ({NOISE}), so that its texts cannot be "
            "replayed. Make it again: `mirrorsd simulate BUNDLE --record FILE`."
        )


def _packed(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float16 if values.dtype.kind == "f" else np.int32)


def _text(arrays: Any, number: int, of_text: Sequence[int], kinds: Sequence[str]) -> RecordedText:
    """A text by its number; `of_text` has the tokens of its prompt, its seed, and whether it ends by itself."""
    num_prompt, seed, *ends = of_text  # older recordings do not say how texts end
    read = {name: _unpacked(arrays[f"{name}_{number}"]) for name in _ARRAYS}
    read |= {name: {kind: _unpacked(arrays[f"{name}_{kind}_{number}"]) for kind in kinds} for name in _HEAD_ARRAYS}
    return RecordedText(num_prompt=num_prompt, seed=seed, ends=any(ends), **read)


def _unpacked(values: NDArray[Any]) -> Any:
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)


def new_tokens(texts: Sequence[RecordedText]) -> int:
    """New tokens of all texts together."""
    return sum(text.num_heads for text in texts)
