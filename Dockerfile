# syntax=docker/dockerfile:1
# Training in NVIDIA's PyTorch image, which has torch, Transformer Engine and their CUDA built for each other.
#   docker build -t gpt2_fp8 .
#   docker run --rm --gpus all --ipc=host -v "$PWD/outputs:/work/outputs" gpt2_fp8 model=gpt2 data=fineweb
ARG BASE=nvcr.io/nvidia/pytorch:26.03-py3
FROM ${BASE}

# The image's own constraints would hold packages that this project needs in later versions. Ours hold torch,
# Transformer Engine and what was compiled against them.
ENV PIP_CONSTRAINT=/opt/gpt2_fp8/constraints.txt \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1
WORKDIR /opt/gpt2_fp8

# What changes seldom comes first, so that a change of the code installs no package again.
COPY pyproject.toml docker/requirements.py ./
RUN python requirements.py pyproject.toml requirements.txt constraints.txt
RUN pip install -r requirements.txt

COPY setup.py README.md LICENSE ./
COPY conf conf
COPY gpt2_fp8 gpt2_fp8
# Without dependencies: pip takes the image's torch to be older than 2.11, and would replace it. From another folder, so
# that what is installed is tried, and not the copy.
RUN pip install --no-deps --no-build-isolation . \
    && cd / && python -m gpt2_fp8.run --help > /dev/null \
    && python -c "import torch, transformer_engine; print(torch.__version__, transformer_engine.__version__)"

# Not as root: what a run writes into a mounted folder belongs to a user. Caches are in a folder that anyone can write.
RUN useradd --create-home --uid 10001 trainer \
    && mkdir -p /work/outputs /cache \
    && chown -R trainer /work && chmod 1777 /work /work/outputs /cache
ENV HF_HOME=/cache/huggingface \
    TIKTOKEN_CACHE_DIR=/cache/tiktoken \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    XDG_CACHE_HOME=/cache
USER 10001
WORKDIR /work
ENTRYPOINT ["python", "-m", "gpt2_fp8.run"]
