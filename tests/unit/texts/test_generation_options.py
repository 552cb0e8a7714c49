"""What an editor completes for `generate` is what `GenerationConfig` has, field by field."""

from typing import get_type_hints

from mirrorsd.texts.config import GenerationConfig, GenerationOptions


def test_the_options_are_the_fields_of_the_config() -> None:
    """A new field of the config must be written down in `GenerationOptions` too, with the same type."""
    assert get_type_hints(GenerationOptions) == get_type_hints(GenerationConfig)


def test_every_option_may_be_left_out() -> None:
    assert GenerationOptions.__required_keys__ == frozenset()
