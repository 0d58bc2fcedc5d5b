# Slotwise in a container: `docker build .` for CPUs, `docker build --target cuda .` for NVIDIA GPUs.
# docs/deployment.md walks through it.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
RUN python -m pip install --no-cache-dir "setuptools>=77"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# PyTorch's own index has builds without CUDA, a tenth of the size.
FROM python:${PYTHON}-slim AS packages-cpu
RUN python -m venv /opt/slotwise
RUN /opt/slotwise/bin/python -m pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
    "torch>=2.11,<2.14"
COPY --from=wheel /wheels /wheels
RUN /opt/slotwise/bin/python -m pip install --no-cache-dir "$(echo /wheels/slotwise-*.whl)[otel]"

# The build of the package registry has CUDA, cuBLAS and Triton; the driver comes from the host.
FROM python:${PYTHON}-slim AS packages-cuda
RUN python -m venv /opt/slotwise
RUN /opt/slotwise/bin/python -m pip install --no-cache-dir "torch>=2.11,<2.14"
COPY --from=wheel /wheels /wheels
RUN /opt/slotwise/bin/python -m pip install --no-cache-dir "$(echo /wheels/slotwise-*.whl)[otel]"

# Models that are downloaded and compiled kernels go to /var/cache/slotwise.  The empty key makes a server without a key end at
# once, with a line that says so: set SLOTWISE_API_KEY when the container is started.
FROM python:${PYTHON}-slim AS runtime
RUN useradd --system --uid 10001 --home-dir /var/cache/slotwise --create-home --shell /usr/sbin/nologin slotwise
ENV PATH=/opt/slotwise/bin:$PATH XDG_CACHE_HOME=/var/cache/slotwise SLOTWISE_API_KEY=
USER 10001
VOLUME /var/cache/slotwise
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s --retries=3 CMD ["python", "-c", "from http.client import HTTPConnection; c = HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]

# Triton compiles the launchers of its kernels with a C compiler.
FROM runtime AS cuda
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/var/cache/slotwise/triton
COPY --from=packages-cuda /opt/slotwise /opt/slotwise
ENTRYPOINT ["slotwise", "serve", "--host", "0.0.0.0", "--port", "8000", "--device", "cuda"]

FROM runtime AS cpu
COPY --from=packages-cpu /opt/slotwise /opt/slotwise
ENTRYPOINT ["slotwise", "serve", "--host", "0.0.0.0", "--port", "8000"]
