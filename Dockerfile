# Image with the tested set of versions (constraints.txt), for NVIDIA GPUs with a driver for CUDA 13, or for a CPU.
#
#   docker build -t rftdask .
#   docker build -t rftdask:cpu --build-arg EXTRAS=train,lora,sql .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" --user "$(id -u):$(id -g)" rftdask run run.yaml
#
# The tests check this file but do not build it, because that needs a network.
FROM python:3.11-slim-bookworm

ARG EXTRAS=gpu,vllm,lora,slurm,sql
# g++ compiles kernels at the start of a run; bubblewrap isolates the code of rollouts.
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

# Home of the user selected by --user, for caches of models and kernels.
ENV HOME=/work
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["rftdask"]
CMD ["--help"]
