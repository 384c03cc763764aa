# An image of the one tested set of versions (constraints.txt), for NVIDIA GPUs with a driver of CUDA 13, or for a CPU.
#
#   docker build -t rftdask .
#   docker build -t rftdask:cpu --build-arg EXTRAS=train,lora,sql .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" --user "$(id -u):$(id -g)" rftdask run run.yaml
#
# It is checked in the tests and not built there, which would take a network.
FROM python:3.11-slim-bookworm

ARG EXTRAS=gpu,vllm,lora,slurm,sql
# Kernels are compiled while a run starts; bubblewrap keeps code of rollouts away from the rest.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rftdask
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY config ./config
COPY examples ./examples
COPY notebooks ./notebooks
COPY rftdask ./rftdask
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

# Whoever starts it, as --user says, has a home: caches of models and kernels go there.
ENV HOME=/work
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["rftdask"]
CMD ["--help"]
