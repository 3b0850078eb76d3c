"""Whether turns are traced: which classes the parts are of that a trace tells of."""

from starlette.types import ASGIApp

from metadata_store import Store
from proxy.admission import Admission
from proxy.answer import AnswerLeg
from proxy.prefill import PrefillLeg
from proxy.prompt_ids import PromptIds
from proxy.release import Releaser
from proxy.routes.api import ApiEndpoint
from proxy.settings import Settings
from proxy.upstream import Upstream


class Traces:
    """Nothing is traced: the parts are what they are, so that this costs a turn nothing."""

    admission: type[Admission] = Admission
    answer_leg: type[AnswerLeg] = AnswerLeg
    prefill_leg: type[PrefillLeg] = PrefillLeg
    prompt_ids: type[PromptIds] = PromptIds
    releaser: type[Releaser] = Releaser
    upstream: type[Upstream] = Upstream

    def store(self, store: Store) -> Store:
        """``store``, its calls traced."""
        return store

    def endpoint(self, endpoint: ApiEndpoint, path: str) -> ASGIApp:
        """``endpoint``, which is at ``path``, its turns traced."""
        return endpoint

    def start(self) -> None:
        """Begin to send to the collector."""

    async def stop(self, patience: float) -> None:
        """Send what is left, for up to ``patience`` seconds."""


def open_traces(settings: Settings) -> Traces:
    """What the settings say. Connects to nothing before it is started."""
    if settings.otlp_endpoint is None:
        return Traces()
    # Not imported at the top: what it needs is there only with the extra ``traces``.
    from proxy.otlp import Collector
    from proxy.traced import Traced

    return Traced(Collector(settings.otlp_endpoint, settings.trace_sample_ratio))
