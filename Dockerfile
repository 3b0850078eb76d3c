# The router. Engines are not in here.
#
#   docker build -t turnback .
#   docker run -p 8000:8000 turnback serve --prefill PREFILL_URL --decode DECODE_URL
#
# Every setting is also a variable (README): docker run -e TURNBACK_PREFILL=… -e TURNBACK_DECODE=… turnback
#
# `turnback bench` and `turnback advise` run anywhere that reaches the router, and what they need is three times the
# size of the router. To have it in the image all the same: docker build --build-arg EXTRAS=bench,traces -t turnback .

FROM python:3.11-slim AS build

ARG EXTRAS=traces
# More arguments for pip, such as another index.
ARG TURNBACK_PIP_ARGS=""

RUN python -m venv --without-pip /opt/turnback
WORKDIR /src
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY proxy ./proxy
COPY router ./router
COPY metadata_store ./metadata_store
COPY bench ./bench
# The constraints name the development tools too; only what the project asks for is installed.
RUN python -m pip --python /opt/turnback/bin/python install --no-cache-dir --disable-pip-version-check \
    -c constraints.txt ${TURNBACK_PIP_ARGS} ".[${EXTRAS}]"


FROM python:3.11-slim

RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent \
    --shell /usr/sbin/nologin turnback
COPY --from=build /opt/turnback /opt/turnback

ENV PATH=/opt/turnback/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TURNBACK_HOST=0.0.0.0

# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8000

# Whether the process answers. Whether it has workers is /ready: a restart would not bring them back.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; router = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('TURNBACK_PORT', '8000')), timeout=4); router.request('GET', '/health'); sys.exit(router.getresponse().status != 200)"]

ENTRYPOINT ["turnback"]
CMD ["serve"]
