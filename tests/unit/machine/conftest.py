"""The scripted models of the runtime's tests: what a machine is measured with decodes, too."""

from ..runtime.conftest import confident_exit, draft_handler, make_bench, scripted  # noqa: TID252

__all__ = ["confident_exit", "draft_handler", "make_bench", "scripted"]
