# An image with everything installed, for machines without Python or make. It is not needed: `make setup` does the same.
#   docker build -t dse .
#   docker run --rm -v "$PWD/outputs:/dse/outputs" dse study=ficco_sweep tracking=none
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /dse
COPY . .
RUN make setup
ENTRYPOINT [".venv/bin/python", "-m", "dse"]
CMD ["--help"]
