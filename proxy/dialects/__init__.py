"""One module per API: where things are in its requests and answers, and what each leg looks like."""

from proxy.dialects.base import ClientRequest, Dialect
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.completions import Completions

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions())

__all__ = ["DIALECTS", "ClientRequest", "Dialect"]
