# make install      a virtual environment in .venv, with the versions of constraints.txt
# make quickstart   train a small model on four nodes, kill and cut off, compare, report, sample
# make test         every check that a change has to pass; what fails is run once more, alone
# make flaky        tests N times while all cores are busy: make flaky TESTS=tests/runtime/wire N=20
# make test-torch   the tests on another release of torch: make test-torch TORCH=2.11
# make test-fp8     the tests of fp8 with torchao, in an environment of their own
# make test-verl    PPO against the functions of verl, which lies in a folder of its own
# make campaign     the long tests (marker slow), and what the next two lines name
# make campaign-bucket  tests of several nodes once more, with a bucket in place of their folder
# make campaign-ceph    runs without a shared disk on a Ceph, where its commands are installed
# make gpu          what runs on one accelerator, in a table and a file (docs/guide/accelerators.md);
#                   ONLY=shared-card: one row
# make gpus         the same for all accelerators of this machine
# make exhaustive   what takes hours and many GiB (marker exhaustive)
# make chaos      over 1,000 faults of a run that several nodes train (docs/studies/chaos.md); SHARD=1/4
# make wheel        dist/: a wheel and the sources; installs the wheel afresh and tries it
# make docs-site    the documentation as a site in build/site, with strict links
# make image BASE=...   the image of deploy/, started once (docs/guide/deploy.md)
# make pictures     the pictures of README.md, from a run in which a worker is killed
# make observe    a real Prometheus and Alertmanager watch a run of four nodes with faults
# make chain        pretrain, fine-tune, prefer, reinforce and distil on a tiny world (docs/studies/chain.md)
# make corrupt-checkpoints  faults of checkpoints: cut short, corrupt, killed at every point

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SIZE ?= small
TORCH ?= 2.11
# Tests wait, for each other and for deadlines: two more than there are processors keep these busy.
PROCESSORS = import os; print(len(os.sched_getaffinity(0)) \
	if hasattr(os, "sched_getaffinity") else os.cpu_count())
JOBS ?= $(shell echo $$(($$($(PYTHON) -c '$(PROCESSORS)') + 2)))
SHARD ?= 1/1
N ?= 20
CHAOS ?= chaos
IMAGE ?= holdfast:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Tests whose nodes take a bucket in place of their folder (HOLDFAST_TEST_STORE=bucket).
IN_BUCKET = $(addprefix tests/system/test_,$(addsuffix .py,nodes_lost grow_and_shrink \
	network_partition recovery_replica_lost recovery_spare_node hang_detection bad_steps))
# A worker gets the cores that the agent gives it; tests get one each.
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Processes start by the hundred: what they import is compiled once, whatever the machine's setting.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install install-dev quickstart test lint pytest flaky test-torch test-fp8 test-verl campaign campaign-bucket campaign-ceph gpu gpus exhaustive chaos chain observe corrupt-checkpoints docs docs-site wheel image pictures clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Holdfast needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: whatever build of the release is at hand (for a CPU, for one CUDA
# version) is taken, and nothing after it changes that.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV): torch first, which is the largest part"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

# The same with what the tests need, of which most is never imported: pip compiles nothing, torch is
# compiled on all processors, and the rest when it is imported.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV): torch first, which is the largest part"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	-$(BIN)/python -m compileall -q -j 0 -x '/torch/(testing|_inductor)/' \
	  $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch
	@touch $(VENV)/.installed $@

quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart/run.py --size $(SIZE)

# Side by side: mypy keeps one processor busy, and tests wait.
test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory -j 2 lint pytest || \
	  { echo; echo "make test failed. Once more, what lint says:"; $(MAKE) --no-print-directory lint; exit 2; }

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/prose.py
	$(BIN)/mypy
	$(BIN)/mypy tests/support/user_file.py
	$(BIN)/lint-imports --no-logo

pytest: $(VENV)/.installed-dev
	$(ONE_THREAD) $(BIN)/python tools/flaky.py retry -n $(JOBS) --dist worksteal -m 'not slow and not exhaustive'

flaky: $(VENV)/.installed-dev
	$(if $(TESTS),,$(error TESTS is missing: make flaky TESTS=tests/runtime/wire N=20))
	$(ONE_THREAD) $(BIN)/python tools/flaky.py repeat $(N) $(TESTS)

campaign: $(VENV)/.installed-dev docs-site
	$(ONE_THREAD) $(BIN)/python -m pytest -m slow
	$(MAKE) --no-print-directory campaign-bucket campaign-ceph

campaign-bucket: $(VENV)/.installed-dev
	HOLDFAST_TEST_STORE=bucket $(ONE_THREAD) $(BIN)/python -m pytest $(IN_BUCKET)

campaign-ceph: $(VENV)/.installed-dev
	HOLDFAST_TEST_S3=ceph $(ONE_THREAD) $(BIN)/python -m pytest -rs tests/system/test_no_shared_disk.py

gpu: $(VENV)/.installed
	$(BIN)/python -m benchmarks.runtime.gpu --out gpu.json $(ONLY:%=--only %)

gpus: $(VENV)/.installed
	$(BIN)/python -m benchmarks.runtime.gpus --out gpus.json

exhaustive: $(VENV)/.installed-dev
	$(ONE_THREAD) $(BIN)/python -m pytest -m exhaustive

chaos: $(VENV)/.installed
	$(BIN)/holdfast chaos --faults 1100 --shard $(SHARD) --out $(CHAOS) \
	  --layout replicated,two,dp_shard,tp,tp-by,cp,ep,ep-cp,pp,interleaved,zbv,zero,mixed,wide,uneven

# It needs the programs of Debian's packages prometheus and prometheus-alertmanager.
observe: $(VENV)/.installed-dev
	$(ONE_THREAD) $(BIN)/python -m pytest -rs -s tests/platform/observe tests/system/test_alerts.py \
	  tests/system/test_webhook.py

chain: $(VENV)/.installed
	$(ONE_THREAD) $(BIN)/python examples/tinyworld/run.py

corrupt-checkpoints: $(VENV)/.installed-dev
	$(ONE_THREAD) $(BIN)/python -m pytest tests/runtime/checkpoint/test_fault_campaign.py \
	  tests/system/test_corrupt_checkpoints.py tests/runtime/checkpoint/save

# Another release of torch gets an environment of its own and every other constraint.
test-torch: $(VENV)-torch$(TORCH)/.installed
	$(ONE_THREAD) $(VENV)-torch$(TORCH)/bin/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow and not exhaustive'

$(VENV)-torch$(TORCH)/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet 'torch==$(TORCH).*'
	$(@D)/bin/python -m pip install --quiet --no-compile -c $(@D)/constraints.txt -e '.[dev]'
	@touch $@

test-fp8: $(VENV)-fp8/.installed
	$(ONE_THREAD) $(VENV)-fp8/bin/python -m pytest -m slow tests/runtime/training/test_float8.py

$(VENV)-fp8/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -c constraints.txt torch
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev,fp8]'
	@touch $@

# verl asks for packages of inference servers, which its functions do not need.
VERL = verl ray tensordict omegaconf antlr4-python3-runtime==4.9.3 codetiming hydra-core orjson \
	cloudpickle pyvers pylatexenc msgpack dill jsonschema referencing rpds-py jsonschema-specifications

test-verl: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)-verl $(VERL)
	HOLDFAST_VERL=$(VENV)-verl $(ONE_THREAD) $(BIN)/python -m pytest -rs -m slow -k verl \
	  tests/runtime/training/test_policy_objectives.py

docs: $(VENV)/.installed
	$(BIN)/holdfast config schema --markdown > docs/reference/run-file.md
	$(BIN)/python -c 'from holdfast_platform.observe.page import page; print(page(), end="")' \
	  > docs/reference/metrics.md

# The site needs no torch: it reads the sources.
docs-site: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet
	@echo "the site: build/site/index.html"

DOCS_EXTRA = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb")) \
	["project"]["optional-dependencies"]["docs"], sep="\n")

$(VENV)-docs/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m venv $(@D)
	$(VENV)/bin/python -c '$(DOCS_EXTRA)' > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt -r $(@D)/requirements.txt
	@touch $@

# The tests build a wheel of their own from the same files.
wheel: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(ONE_THREAD) $(BIN)/python -m pytest tests/system/test_wheel.py
	@ls dist

image:
	BASE="$(BASE)" deploy/build.sh $(IMAGE)

pictures: $(VENV)/.installed
	$(BIN)/python tools/pictures.py

clean:
	rm -rf $(VENV) $(VENV)-torch* $(VENV)-docs build dist
