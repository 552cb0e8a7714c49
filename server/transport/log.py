"""Logs: one line of JSON per event, nothing of a prompt, and nothing that a client sent unescaped."""

import json
import logging
import sys
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """JSON has escapes for all control characters, so that no client can forge a line or colour a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        document = {"time": when, "level": record.levelname.lower(), "message": record.getMessage()}
        facts = getattr(record, "facts", None)
        if facts:
            document |= facts
        if record.exc_info and record.exc_info[1] is not None:
            document["error"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=True, default=str)


def log_to_stderr(*, is_quiet: bool = False) -> None:
    """Send logs of the server and uvicorn, and warnings of others, to stderr; no mere news if it is quiet."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("mirrorsd.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING if is_quiet or name != "mirrorsd.server" else logging.INFO)
    logging.captureWarnings(True)
    for name in ("mirrorsd", "asyncio", "py.warnings"):  # of the runtime, of a load that nobody waits for any more
        logging.getLogger(name).handlers = [handler]
