"""Cases made from the server's own OpenAPI document, by schemathesis: none may be the server's fault.

    python scripts/openapi_cases.py http://127.0.0.1:8600 --cases 2000

The server must be running, without a key. An answer is wrong with a status of 500 or more (503 apart), and with a body
that is neither JSON nor what the document says.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode

_SLOW_S = 60.0
_OF_OTHERS = 5
"""Cases of an operation without a body."""
_SHORT = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 1}


@dataclass
class Report:
    """What came of the cases: how many, their statuses, and each failure in a line."""

    num_cases: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run_cases(url: str, count: int) -> Report:
    """Send `count` cases or more, evenly over the operations with a body, valid ones and invalid ones.

    Texts are kept short, and valid cases ask for the model that is there: it is the server that is tried.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method.upper() == "POST"]
    report = Report()
    for operation in operations:
        share = -(-count // len(posts)) if operation in posts else _OF_OTHERS
        _run(operation, GenerationMode.POSITIVE, share - share // 2, report)
        if operation in posts:
            _run(operation, GenerationMode.NEGATIVE, share // 2, report)
    return report


def _run(operation: Any, mode: GenerationMode, count: int, report: Report) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = {name: _short(name, value) for name, value in case.body.items() if name != "model"}
        answer = case.call(timeout=_SLOW_S)
        report.num_cases += 1
        report.statuses[answer.status_code] = report.statuses.get(answer.status_code, 0) + 1
        problem = _problem(answer)
        if problem:
            report.failures.append(f"{operation.method.upper()} {operation.path}: {problem}: {str(case.body)[:200]}")

    send()


def _short(name: str, value: Any) -> Any:
    return _SHORT[name] if name in _SHORT and isinstance(value, int) and value > _SHORT[name] else value


def _problem(answer: Any) -> str:
    """What is wrong with an answer; empty if nothing is."""
    status = answer.status_code
    if status >= 500 and status != 503:
        return f"status {status}: {answer.text[:200]}"
    kind = answer.headers.get("content-type", [""])[0]
    if status >= 400 and "error" not in json.loads(answer.text or "{}"):
        return f"status {status} without an error: {answer.text[:100]}"
    if status == 200 and not kind.startswith(("application/json", "text/")):
        return f"content type {kind}"
    return ""


def main() -> int:
    """Run the cases and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=2000)
    options = parser.parse_args()
    report = run_cases(options.url, options.cases)
    print(f"{report.num_cases} cases, by status: {dict(sorted(report.statuses.items()))}")
    for line in report.failures:
        print(f"FAILED {line}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
