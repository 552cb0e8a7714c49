"""A server that speaks OpenAI's protocol: conversations over HTTP, on the pipeline's sessions.

May know the runtime's public face; nothing but the commands `serve` and `front` knows it.
"""

from mirrorsd.server.app import build_app
from mirrorsd.server.bundles.shelf import named_folders
from mirrorsd.server.running import Running, run, serve
from mirrorsd.server.settings import Limits, ServerSettings
from mirrorsd.server.transport.log import log_to_stderr

__all__ = ["Limits", "Running", "ServerSettings", "build_app", "log_to_stderr", "named_folders", "run", "serve"]
