# Every target installs what it needs; `make` alone lists them.
VENV ?= .venv
BIN := $(VENV)/bin
ENGINE := scripts/setup.sh engine
DEV := scripts/setup.sh dev
export VENV
# The whole suite runs in several processes (tests/conftest.py: how many). Each takes about half a GB, so five are
# enough. A file's tests stay together: they share servers, and some ask what the ones before left.
WHOLE_SUITE := -n auto --maxprocesses 5 --dist loadfile --no-loadscope-reorder

# What decides, and the simulator that tries it: measured and gated by `make coverage`.
COVERED := protocol kv schedule policy sim
COVERAGE_MIN := 90

.DEFAULT_GOAL := help
.PHONY: help serve observe chat test coverage mutants test-workers test-clients test-prometheus test-lm-eval test-transformers test-wheel test-console test-cells test-leader console console-check check format bench bench-engine bench-ratchet bench-relay soak train-demo clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve:  ## install what is needed and serve the demo model on http://127.0.0.1:8000/v1 (PENSTOCK_PORT, PENSTOCK_API_KEY; ARGS="MODEL --flags")
	@$(ENGINE)
	@exec $(BIN)/penstock serve $(ARGS)

observe:  ## Prometheus and Alertmanager beside a running server, with its alerts (unpacks both first; http://127.0.0.1:9090)
	@$(ENGINE)
	@scripts/install_prometheus.sh
	@examples/observability/run.sh

chat:  ## talk to a running server in the terminal
	@$(ENGINE)
	@exec $(BIN)/penstock chat $(ARGS)

test:  ## install what is needed and run the test suite (ARGS="tests/kv -k pool" for a part, in one process)
	@$(DEV)
	@$(BIN)/pytest $(or $(ARGS),$(WHOLE_SUITE))

coverage:  ## branch coverage of the packages that decide and of the simulator, by their own tests: at least 90 % each (minutes)
	@$(DEV)
	@mkdir -p bench/out/coverage && $(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -p no:cacheprovider $(WHOLE_SUITE) $(COVERED:%=tests/%)
	@$(BIN)/coverage combine --quiet
	@failed=0; for package in $(COVERED); do echo; \
		$(BIN)/coverage report --include="penstock/$$package/**" --fail-under=$(COVERAGE_MIN) || failed=1; \
	done; exit $$failed

mutants:  ## a seeded sample of mutants of policy, schedule and kv before their tests: at most 10 % survive (minutes; ARGS="--count 5 kv")
	@$(DEV)
	@$(BIN)/python scripts/mutants.py $(ARGS)

test-workers:  ## the tests with real servers of others: vLLM, Triton, Ray (installs those first; ARGS="-k ray" for a part)
	@$(DEV)
	@bench/peers/install_vllm.sh
	@bench/peers/install_triton.sh
	@scripts/install_ray.sh
	@$(VENV)/ray/bin/python -m pytest -m workers $(ARGS)

test-prometheus:  ## the alerts and dashboards before a real Prometheus, promtool and Alertmanager (unpacks those first; minutes)
	@$(DEV)
	@scripts/install_prometheus.sh
	@$(BIN)/pytest -m prometheus -n0 tests/telemetry $(ARGS)

test-clients:  ## clients of others, in Python and Node, against a served demo model: typed answers and agent loops (installs those first; minutes)
	@$(DEV)
	@scripts/install_clients.sh
	@$(BIN)/pytest -m clients -n0 tests/clients $(ARGS)

test-lm-eval:  ## lm-eval's log-likelihoods over our API beside those of transformers (installs lm-eval first; minutes)
	@$(DEV)
	@scripts/install_lm_eval.sh
	@$(BIN)/python scripts/check_lm_eval.py

test-transformers:  ## what `penstock quantize` writes, in transformers beside our engine (installs gptqmodel and compressed-tensors first; minutes)
	@$(DEV)
	@scripts/install_gptqmodel.sh
	@$(BIN)/python scripts/check_transformers.py

test-wheel:  ## build the wheel, install it with its engine into a new environment, serve and ask there, without a compiler (minutes)
	@$(DEV)
	@$(BIN)/python scripts/test_wheel.py $(ARGS)

test-cells:  ## three cells of real processes, one of which is killed under load (a minute)
	@$(DEV)
	@$(BIN)/pytest -m cells -n0 tests/cli/test_serve_cells.py $(ARGS)

test-leader:  ## two servers before one Kubernetes workload (kmock) and one Redis, of which one is killed (a minute)
	@$(DEV)
	@$(BIN)/pytest -m leader -n0 tests/cli/test_serve_leader.py $(ARGS)

test-console:  ## the console in a real Chromium: every page, keyboard, axe-core, a real gateway (installs those first; minutes)
	@$(DEV)
	@scripts/install_console.sh
	@$(BIN)/pytest -m console -n0 tests/console $(ARGS)

console:  ## build the console's page from console/ into the package (needs Node 20; nothing else does)
	@cd console && npm ci --ignore-scripts --no-fund --no-audit --loglevel=error && npm run --silent build

console-check:  ## type check console/, build it again and compare with what is committed, byte by byte (needs Node 20)
	@cd console && npm ci --ignore-scripts --no-fund --no-audit --loglevel=error && npm run --silent check

check:  ## format, lint and type check
	@$(DEV)
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make format'"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright

format:  ## rewrite the sources in the house format, and the pages of configuration keys and models
	@$(DEV)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/python scripts/config_page.py
	@$(BIN)/python scripts/models_page.py

bench:  ## TTFT, TPOT and throughput of the demo model at concurrency 1, 8, 32
	@$(DEV)
	@$(BIN)/python -m bench.relay.served $(ARGS)

bench-relay:  ## the gateway's CPU per 1,000 requests beside smg, vllm-router, Envoy, nginx, LiteLLM (installs them; ARGS=--quick)
	@$(DEV)
	@bench/relay/install_peers.sh
	@$(BIN)/python -m bench.relay.peers $(ARGS)

bench-ratchet:  ## ratios that were reached once, measured again: a worse one fails (a minute or two; ARGS="--update" records)
	@$(DEV)
	@$(BIN)/python -m bench.ratchet $(ARGS)

soak:  ## ten thousand paced streams for half an hour: errors, delay per chunk, memory
	@$(DEV)
	@$(BIN)/python -m bench.relay.streams_10k --seconds 1800 --out bench/out/soak.json $(ARGS)

bench-engine:  ## our engine beside vLLM and llama.cpp on the same models (installs both; about an hour; ARGS=--quick for ten minutes)
	@$(DEV)
	@bench/peers/install_vllm.sh || echo "vLLM could not be installed: its rows will be missing" >&2
	@bench/peers/install_llama_cpp.sh || echo "llama.cpp could not be built: its rows will be missing" >&2
	@$(BIN)/python -m bench.engine.beside_peers $(ARGS)

simulate:  ## the policy gate: fixed scenarios and seeds on virtual time against the recorded baseline (a minute or two; ARGS=--update)
	@$(DEV)
	@$(BIN)/python -m bench.sim.gate $(ARGS)

simulate-nightly:  ## two thousand seeds with drawn failures, each checked, and every scenario on 50 seeds (hours)
	@$(DEV)
	@$(BIN)/python scripts/swarm.py --seeds 2000
	@$(BIN)/python -m bench.sim.gate --seeds 50

train-demo:  ## make the demo models again from nothing (two cores: under two hours; a GPU is used if there is one)
	@$(DEV)
	@$(BIN)/python -m training.make_demo $(ARGS)

clean:  ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis bench/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
