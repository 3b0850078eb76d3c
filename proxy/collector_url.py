"""The address of a trace collector, as the settings have it."""

from importlib.util import find_spec

from proxy.http_url import has_credential, http_url

_PATH = "/v1/traces"


def collector_url(text: str) -> str:
    """Where a collector takes spans: ``text``, with OTLP's path at its end.

    Raises ``ValueError`` if it is no http(s) URL, or if what sends traces is not installed.
    """
    url = http_url(text, "an OTLP/HTTP collector (http://HOST:4318)")
    if has_credential(url):
        raise ValueError(
            f"{url.host}: a credential goes into the variable OTEL_EXPORTER_OTLP_HEADERS, not into the URL"
        )
    if not _installed():
        raise ValueError("traces need more packages: pip install 'turnback[traces]'")
    return text.rstrip("/").removesuffix(_PATH) + _PATH


def _installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False
