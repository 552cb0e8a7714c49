"""What a request asks to be read: a prompt, a conversation or ids become ids; and the form that its text shall have."""

from collections.abc import Sequence

from mirrorsd.graphs.errors import ConfigError, GenerationError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.constraint import ConstraintCompiler
from mirrorsd.texts.messages import Message
from mirrorsd.texts.setting_rules import shown
from mirrorsd.texts.tokenizer import BundleTokenizer, read_ids


class RequestReader:
    """Reads the requests of one bundle.

    Attributes:
        tokenizer: of the bundle.
        constraints: makes what constrained texts follow.
    """

    def __init__(self, tokenizer: BundleTokenizer, manifest: Manifest) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = manifest.target.shape.vocab_size
        self.constraints = ConstraintCompiler(
            tokenizer, self._vocab_size, manifest.tokens.eos_ids, manifest.target.context
        )

    def read(
        self,
        prompt: str | None,
        messages: Sequence[Message] | None,
        token_ids: Sequence[int] | None,
        settings: GenerationConfig,
    ) -> list[int]:
        """Ids of exactly one of the three.

        Raises:
            ConfigError: a setting that needs messages, or an id that the vocabulary does not have.
            GenerationError: none of them or several, or one that cannot be read.
        """
        given = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
        found = [name for name, value in given.items() if value is not None]
        if len(found) != 1:
            raise GenerationError(
                f"Give exactly one of prompt, messages and token_ids; found {' and '.join(found) or 'none of them'}."
            )
        self._check_ids(settings)
        if messages is not None:
            return self.tokenizer.encode_chat(messages, settings.tools, settings.template_variables)
        for name in ("tools", "template_variables"):
            if getattr(settings, name):
                raise ConfigError(
                    f"GenerationConfig.{name} is for the chat template: give messages instead of {found[0]}."
                )
        return self.tokenizer.encode(prompt) if prompt is not None else read_ids(token_ids, self._vocab_size)

    def _check_ids(self, settings: GenerationConfig) -> None:
        outside = [token for token in settings.biases if token >= self._vocab_size]
        if outside:
            raise ConfigError(
                f"GenerationConfig.logit_bias names the id {shown(outside[0])}; allowed: 0 to {self._vocab_size - 1}, "
                "the vocabulary of this bundle."
            )
        read_ids(settings.stop_token_ids, self._vocab_size, "stop_token_ids")
        read_ids(settings.prediction, self._vocab_size, "prediction")
        read_ids(settings.continue_from, self._vocab_size, "continue_from")
