# The image of deploy/kubernetes/rayservice.yaml: docker build --file deploy/kubernetes/ray.Dockerfile --tag slotwise:ray .
FROM rayproject/ray:2.60.0-py311-cpu
COPY --chown=ray pyproject.toml README.md LICENSE /home/ray/slotwise/
COPY --chown=ray src /home/ray/slotwise/src
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch>=2.11,<2.14" && \
    pip install --no-cache-dir "/home/ray/slotwise[ray]"
