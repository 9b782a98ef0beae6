# Two commands do everything on a fresh machine with a Rust toolchain, a C compiler and Python 3:
#   make serve    builds, then serves the example repository: HTTP 8000, gRPC 8001, metrics 8082
#   make wheel    builds the wheels pharos-server for x86-64 and aarch64 into target/wheels (some minutes for each)
#   make test     sets up what the tests need under target/, then runs all of them, Rust and real clients
#                 (tests that need Debian's prometheus, chromium or redis-server are skipped with a note without it)
.DEFAULT_GOAL := help
.PHONY: help serve speech text cluster sklearn xgboost pytorch example-backends test-workers build test test-rust test-clients test-under-load smoke soak lint bench bench-peers bench-many-models bench-growth fuzz simulate mutants tools python-worker wheel release kserve-sdk gpu-pack

CARGO ?= cargo
PYTHON ?= python3
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
VENV := $(TARGET)/venv
# The only profile that is used: see Cargo.toml.
PROFILE := --release

# These variables have the values that maturin sets. If they changed between cargo and maturin, pyo3 would be compiled again.
export PYO3_PYTHON ?= $(shell command -v $(PYTHON))
export PYO3_ENVIRONMENT_SIGNATURE ?= $(shell $(PYTHON) -c 'import sys; print("%s-%d.%d-64bit" % (sys.implementation.name, *sys.version_info[:2]))' 2>/dev/null)

help:
	@sed -n 's/^#   //p' Makefile; echo 'also: make python-worker | smoke | test-under-load | lint | bench | bench-peers | bench-many-models | bench-growth | fuzz | simulate | mutants | soak | gpu-pack   (SERVE_FLAGS="..." are passed to the server)'

tools:
	@command -v $(CARGO) >/dev/null || { echo "cargo is missing: install Rust 1.95 or later, see https://rustup.rs"; exit 1; }
	@command -v cc >/dev/null || { echo "a C compiler is missing: install gcc or clang (Debian: apt-get install build-essential)"; exit 1; }

build: tools
	$(CARGO) build $(PROFILE) --locked

serve: build
	$(TARGET)/release/pharos --model-repository examples/models $(SERVE_FLAGS)

# The speech example: downloads its model, runs it in a separate server, and draws target/speech.svg.
speech: build $(VENV)/ready
	$(VENV)/bin/python examples/speech/fetch.py
	$(VENV)/bin/python examples/speech/detect.py --server $(TARGET)/release/pharos --plot $(TARGET)/speech.svg

# The examples of frameworks: each trains a model of the digits in a separate environment, serves it, and classifies the held-out
# images. The PyTorch package of PyPI has several gigabytes because of its CUDA libraries.
sklearn xgboost pytorch: build python-worker
	$(PYTHON) -m venv $(TARGET)/venv-$@
	$(TARGET)/venv-$@/bin/python -m pip install --quiet --disable-pip-version-check -r examples/frameworks/$@/requirements.txt
	$(TARGET)/venv-$@/bin/python -m pip install --quiet --disable-pip-version-check $(TARGET)/wheels/pharos_worker-*.whl
	$(TARGET)/venv-$@/bin/python examples/frameworks/make_models.py $@
	$(TARGET)/venv-$@/bin/python examples/frameworks/ask.py --server $(TARGET)/release/pharos \
	  --models examples/frameworks/$@/models $(notdir $(wildcard examples/frameworks/$@/models/*))

# The text example: a tokenizer in Python and an ONNX model, made in a separate environment and served as an ensemble.
text: build python-worker
	$(PYTHON) -m venv $(TARGET)/venv-$@
	$(TARGET)/venv-$@/bin/python -m pip install --quiet --disable-pip-version-check -r examples/text/requirements.txt
	$(TARGET)/venv-$@/bin/python -m pip install --quiet --disable-pip-version-check $(TARGET)/wheels/pharos_worker-*.whl
	$(TARGET)/venv-$@/bin/python examples/text/make_models.py
	$(TARGET)/venv-$@/bin/python examples/text/ask.py --server $(TARGET)/release/pharos --models examples/text/models \
	  "my parcel has not arrived" "the app shows an error"

# Three servers behind Envoy, with an object store and a Redis: restarts under load. CLUSTER_FLAGS=--stay keeps them running.
cluster: build
	@command -v redis-server >/dev/null || { echo "redis-server is missing: install it (Debian: apt-get install redis-server)"; exit 1; }
	$(PYTHON) -m venv $(TARGET)/venv-$@
	$(TARGET)/venv-$@/bin/python -m pip install --quiet --disable-pip-version-check -r examples/cluster/requirements.txt
	$(TARGET)/venv-$@/bin/python examples/cluster/cluster.py --server $(TARGET)/release/pharos $(CLUSTER_FLAGS)

# The example backend in Rust and the backend of the tests. Built together with the other packages: alone, their dependencies would
# have other features and be compiled again.
test-workers: tools
	$(CARGO) build $(PROFILE) --locked -p pharos -p pharos-frontend -p pharos-worker -p pharos-worker-scale -p pharos-test-backends

# Builds the example backends into the folder where the server searches for them, beside its executable.
BACKENDS := $(TARGET)/release/backends
example-backends: tools
	$(CARGO) build $(PROFILE) --locked -p pharos -p pharos-frontend -p pharos-worker -p pharos-worker-scale
	mkdir -p $(BACKENDS)/normalize $(BACKENDS)/scale
	cc -std=c11 -O2 -Wall -shared -fPIC -I worker/include -o $(BACKENDS)/normalize/libpharos_normalize.so examples/backend_c/normalize.c -lm
	ln -sf ../../pharos-worker-scale $(BACKENDS)/scale/pharos-worker-scale

# KServe's SDK for tests/python/protocol/test_kserve.py, in a separate environment because of its many dependencies (about 450 MB).
kserve-sdk:
	$(PYTHON) -m venv $(TARGET)/kserve
	$(TARGET)/kserve/bin/python -m pip install --quiet --disable-pip-version-check kserve==0.21.0

# The Python worker: builds a wheel for Python 3.9 and later, and installs it into the environment of the tests.
WHEELS := $(TARGET)/wheels
python-worker: tools $(VENV)/ready
	rm -f $(WHEELS)/pharos_worker-*.whl
	CARGO=$(abspath worker/python/cargo-together) REAL_CARGO=$(CARGO) CARGO_TARGET_DIR=$(abspath $(TARGET)) $(VENV)/bin/maturin build \
	  --locked --quiet -m worker/python/Cargo.toml -i $(PYO3_PYTHON) -o $(WHEELS)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps $(WHEELS)/pharos_worker-*.whl

# The wheels pharos-server: the executables and the Python worker, for glibc 2.28 and later. zig links against that version and
# for other architectures. Its own target folder, because the linker and the stripped symbols would compile everything again.
WHEEL_MACHINES ?= x86_64 aarch64
WHEEL_TOOLS := $(TARGET)/venv-wheel
# The same source makes the same wheels on every machine with the same versions of Rust and Python's zlib. Messages of panics name
# source files: of several prefixes of a path, the last one holds. The allocator contains the time of its compilation, and zig's cache
# returns objects that were compiled with another time.
SAME_PATHS := --remap-path-prefix=$(CURDIR)=/pharos --remap-path-prefix=$(abspath $(TARGET))=/target \
  --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo
SAME_TIMES := SOURCE_DATE_EPOCH=315532800 ZIG_GLOBAL_CACHE_DIR=$(abspath $(TARGET))/wheel-build/zig
wheel: tools
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check ziglang==0.17.1 cargo-zigbuild==0.24.0 auditwheel==6.8.2 tomli
	$(PYTHON) deploy/release/release.py notices --to $(TARGET)/notices
	rm -f $(WHEELS)/pharos_server-*.whl
	for machine in $(WHEEL_MACHINES); do \
	  if command -v rustup >/dev/null; then rustup target add $$machine-unknown-linux-gnu || exit 1; fi; \
	  PATH=$(abspath $(WHEEL_TOOLS))/bin:$$PATH $(SAME_TIMES) RUSTFLAGS="$(SAME_PATHS)" CARGO_PROFILE_RELEASE_STRIP=symbols $(CARGO) zigbuild $(PROFILE) --locked \
	    --target $$machine-unknown-linux-gnu.2.28 --target-dir $(TARGET)/wheel-build -p pharos -p pharos-frontend -p pharos-worker -p pharos-worker-python && \
	  $(WHEEL_TOOLS)/bin/python deploy/wheel/pack.py --from $(TARGET)/wheel-build/$$machine-unknown-linux-gnu/release --to $(WHEELS) --notices $(TARGET)/notices && \
	  $(WHEEL_TOOLS)/bin/auditwheel show $(WHEELS)/pharos_server-*_$$machine.whl || exit 1; done

# The wheels, archives of the executables, SBOM, licences, changes and checksums of this version.
release: wheel
	$(PYTHON) deploy/release/release.py release --wheels $(WHEELS) --to $(TARGET)/release-files

test: test-rust test-clients

# The tests of ONNX Runtime use the library of the Python package.
test-rust: tools $(VENV)/ready
	ORT_DYLIB_PATH=$${ORT_DYLIB_PATH:-$$(ls $(abspath $(VENV))/lib/python3*/site-packages/onnxruntime/capi/libonnxruntime.so.* | head -n 1)} \
	  $(CARGO) test $(PROFILE) --locked --workspace
	$(TARGET)/release/examples/loom

# The clients, in a virtual environment that is created again when the list changes.
$(VENV)/ready: tests/requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "python3 is missing: install Python 3.9 or later (Debian: apt-get install python3 python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt || { \
	  echo "the clients of tests/requirements.txt cannot be installed: is the Python package index reachable?"; exit 1; }
	touch $@

test-clients: test-workers python-worker $(VENV)/ready
	@command -v curl >/dev/null || { echo "curl is missing: install it (Debian: apt-get install curl)"; exit 1; }
	PYTHONPATH=tests/python $(VENV)/bin/python -m harness.prometheus
	PYTHONPATH=tests/python $(VENV)/bin/python -m harness.guest_kernel
	PYTHONPATH=tests/python $(VENV)/bin/python -m deploy.schemas
	PHAROS_BIN=$(abspath $(TARGET))/release/pharos $(VENV)/bin/python tests/python/run.py -q -rs --durations=50 tests/python

# A choice of the client tests that touches every area, in under a minute, after the build.
smoke: test-workers python-worker $(VENV)/ready
	PHAROS_BIN=$(abspath $(TARGET))/release/pharos $(VENV)/bin/python tests/python/run.py -q -rs -m smoke tests/python

# All client tests in eight processes, also on a machine with two cores, LOAD_RUNS times: see docs/src/internals/tests.md. A failed
# test is not repeated.
LOAD_RUNS ?= 1
LOAD_PROCESSES ?= 8
test-under-load: test-workers python-worker $(VENV)/ready
	PHAROS_PEERS=none PHAROS_TEST_PROCESSES=$(LOAD_PROCESSES) PHAROS_BIN=$(abspath $(TARGET))/release/pharos \
	  nice -n 5 $(VENV)/bin/python tests/python/run.py -q --runs=$(LOAD_RUNS) tests/python

# Long runs of tests that normally take seconds: 400,000 samples per second from workers that are killed, a random load, and
# a hundred reloads under load; and a random run with models on demand, which only this runs.
SOAK_SECONDS ?= 60
soak: test-workers $(VENV)/ready
	PHAROS_SOAK_S=$(SOAK_SECONDS) PHAROS_RELOADS=100 PHAROS_BIN=$(abspath $(TARGET))/release/pharos \
	  $(VENV)/bin/python -m pytest -q -s -m soak --timeout=0 tests/python

# Packs the tests and benchmarks for a machine with a GPU into one folder: see tests/gpu/README.md. GPU_PACK_FLAGS="--fetch 3.12".
gpu-pack: build python-worker
	PHAROS_BIN=$(abspath $(TARGET))/release/pharos $(VENV)/bin/python tests/gpu/pack.py --to $(TARGET)/gpu $(GPU_PACK_FLAGS)

lint: tools
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(PROFILE) --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(PROFILE) --locked --no-deps --workspace
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny check; else echo "cargo-deny is not installed: licences and sources are not checked"; fi
	@if command -v pip-audit >/dev/null; then pip-audit --requirement tests/requirements.txt; else echo "pip-audit is not installed: the Python packages of the tests are not checked for known vulnerabilities"; fi

# Compares this server, a bare echo server with the same payload, and Triton if its peer is installed, in one run.
# Example: BENCH_FLAGS="--rounds 5 --only simple/http"; see --help.
bench: build
	$(CARGO) bench --profile release --locked -p e2e --bench paths -- --noplot
	$(CARGO) build $(PROFILE) --locked -p e2e --bin bench
	PHAROS_BIN=$(abspath $(TARGET))/release/pharos $(TARGET)/release/bench $(BENCH_FLAGS)

# Compares this server with LitServe, mosec, MLServer, FastAPI, and Triton if its peer is installed, and with ONNX Runtime in a loop.
# Example: BENCH_FLAGS="--rounds 5 --only encoder"; see tests/bench_peers/run.py. MLServer does not support Python 3.13 and later.
PEERS := $(TARGET)/venv-peers
bench-peers: build python-worker
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/bench_peers/requirements.txt
	if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then $(PYTHON) -m venv $(PEERS)-mlserver && \
	  $(PEERS)-mlserver/bin/python -m pip install --quiet --disable-pip-version-check -r tests/bench_peers/requirements-mlserver.txt; fi
	$(PEERS)/bin/python tests/bench_peers/run.py --server $(TARGET)/release/pharos --to $(TARGET)/bench-peers $(BENCH_FLAGS)

# Measures a server with a hundred and a thousand models: start, memory, end, scrapes, and a limit of the memory of models.
bench-many-models: build python-worker $(VENV)/ready
	PHAROS_BIN=$(abspath $(TARGET))/release/pharos $(VENV)/bin/python tests/bench_many_models/run.py $(BENCH_FLAGS)

# Measures how the cost grows with clients, models, instances and bytes; draws the curves to target/bench-growth. Needs 1,100 descriptors.
bench-growth: test-workers $(VENV)/ready
	mkdir -p $(BACKENDS)/test && ln -sf ../../pharos-worker-test $(BACKENDS)/test/
	$(CARGO) build $(PROFILE) --locked -p e2e --bin bench
	ulimit -n $$(ulimit -H -n); PHAROS_BIN=$(abspath $(TARGET))/release/pharos $(VENV)/bin/python tests/bench_growth/run.py \
	  --bench $(TARGET)/release/bench --to $(TARGET)/bench-growth $(BENCH_FLAGS)

# Simulates drivers, supervisors, the rate limiter and the response cache, and beside it the loader, in virtual time, with a new seed each
# time: see docs/src/internals/tests.md. A later run begins at the last FIRST_SEED plus the number of simulations.
SECONDS ?= 60
FIRST_SEED ?= 1000
simulate: tools
	PHAROS_SIMULATE_SECONDS=$(SECONDS) PHAROS_SIMULATE_FIRST_SEED=$(FIRST_SEED) \
	  $(CARGO) test $(PROFILE) --locked -p pharos-engine --lib simulate_for_long -- --ignored --nocapture

# Checks that the simulation finds each of the deliberate faults in tests/mutants, a build each: half an hour.
mutants: tools
	PROFILE="$(PROFILE)" CARGO="$(CARGO)" $(PYTHON) tests/mutants/run.py $(MUTANTS)

# Runs each target for one minute; requires cargo-fuzz (cargo install cargo-fuzz).
SECONDS_EACH ?= 60
FUZZ_TARGETS ?= $(basename $(notdir $(wildcard tests/fuzz/fuzz_targets/*.rs)))
fuzz: tools
	@command -v cargo-fuzz >/dev/null || { echo "cargo-fuzz is missing: cargo install cargo-fuzz"; exit 1; }
	for target in $(FUZZ_TARGETS); do \
	  RUSTC_BOOTSTRAP=1 $(CARGO) fuzz run --fuzz-dir tests/fuzz $$target -- -max_total_time=$(SECONDS_EACH) -max_len=65536 || exit 1; done
