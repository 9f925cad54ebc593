# The image classification example for machines without a GPU. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t fast_batcher:cpu .
FROM python:3.11-slim

# Logs at once; no pip cache in the image. The numbered user below has no home of its own.
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    HOME=/tmp

WORKDIR /app

# The largest layer first: it changes least. This index has builds without CUDA, 200 MB and not 3 GB.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "$TORCH_INDEX" torch==2.13.0

# Then what we require, in a layer that the code does not touch; the build reads the version.
COPY pyproject.toml README.md LICENSE ./
COPY fast_batcher/_version.py fast_batcher/
RUN pip install '.[images]' uvicorn httptools uvloop

COPY fast_batcher fast_batcher
RUN pip install --no-deps --force-reinstall .
COPY examples examples

# A number, so that Kubernetes can see that it is not root. Nothing here is this user's to write.
USER 10001:10001
EXPOSE 8000

# /readyz answers 200 once the model is loaded. Until the start period is over (the library gives a
# model 300 s to load) failures do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]

# Exec form, so that uvicorn itself is sent SIGTERM. It lets answers finish for 20 s; then the batcher,
# with nothing left to drain, ends its workers within 2 s.
CMD ["uvicorn", "examples.image_classification.app:app", "--host", "0.0.0.0", "--port", "8000", "--no-access-log", "--timeout-graceful-shutdown", "20"]
