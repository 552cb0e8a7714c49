"""What a form costs: tokens per second of JSON by a schema of ten fields, against free text of as many tokens.

    python bench/claims/constrained.py pair.mirror --device-map cpu --output constrained.json

Both take turns on every prompt, plainly and by `auto`. Free text goes on past its end until it is as long as the form's
text of that prompt. Every text of a form must be a JSON document of the schema.
"""

import json
from pathlib import Path
from typing import Any

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.runtime.reporting.results import GenerationResult

WORDS = ("name", "town", "animal", "colour", "food")
NUMBERS = ("age", "height_cm", "friends")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        **{word: {"type": "string", "maxLength": 24} for word in WORDS},
        **{number: {"type": "integer", "minimum": 0, "maximum": 999} for number in NUMBERS},
        "is_happy": {"type": "boolean"},
        "mood": {"enum": ["glad", "sad", "calm", "angry"]},
    },
    "required": [*WORDS, *NUMBERS, "is_happy", "mood"],
    "additionalProperties": False,
}
METHODS = ("plain", "auto")


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__, count=8, tokens=200)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    config = runs.text_config(options)
    found: dict[tuple[str, str], list[GenerationResult]] = {}
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe, pipe.session() as session:
        for repeat in range(options.repeats + 1):
            for messages in prompts:
                for method in METHODS:
                    of_method = config.with_overrides({"method": method})
                    formed = session.generate(messages=messages, config=of_method, json_schema=SCHEMA)
                    assert set(json.loads(formed.text)) == set(SCHEMA["required"]), formed.text
                    as_long: Any = {"max_new_tokens": formed.num_tokens, "ignore_eos": True}
                    free = session.generate(messages=messages, config=of_method.with_overrides(as_long))
                    for kind, result in (("constrained", formed), ("free", free)):
                        found.setdefault((method, kind), []).extend([result] if repeat else [])
    rows = [row(method, found) for method in METHODS]
    runs.print_rows(rows, tuple(rows[0]))
    report = runs.header(options.bundle, device_map=options.device_map, texts=len(prompts), tokens=options.tokens)
    runs.finish(report | {"ends": "ignored in free texts", "rows": rows}, options.output)


def row(method: str, found: dict[tuple[str, str], list[GenerationResult]]) -> dict[str, Any]:
    """One method's speeds."""
    formed, free = (runs.speed(found[method, kind]) for kind in ("constrained", "free"))
    return {
        "method": method,
        "constrained": round(formed, 2),
        "free": round(free, 2),
        "constrained_to_free": round(formed / free, 3),
        "tokens_per_text": round(runs.sum_up(found[method, "constrained"])["tokens_per_text"], 1),
    }


if __name__ == "__main__":
    main()
