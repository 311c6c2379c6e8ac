# Needs Python 3.10 or newer and nothing else: `make demo` and `make test` set up what they use, once.
PYTHON ?= python3
# Passed on: make test ARGS="-k store -x", make bench ARGS="--help"
ARGS ?=
# Several files of tests at a time: a part of the time is waiting for a server. The tests of one file share theirs. The
# order is in tests/support/scheduling.py. With vLLM in its process, each of them keeps a core busy.
AT_ONCE := --numprocesses 3 --dist loadfile
COLOCATE_AT_ONCE := --numprocesses 2 --dist loadfile

TRAINER := .venv
SERVER := .venv-vllm
COLOCATE := .venv-colocate
SOURCES := trl_lora_sync tests examples benchmarks tools
# Other TRL versions that the tests run as well; 1.16 is the one in $(TRAINER). To try a newer one as soon as it is out:
#   make trl-versions TRL_VERSIONS=1.18.0 && make test ARGS="tests/live/test_trl_versions.py -k 1.18.0"
TRL_VERSIONS := 1.11.0 1.12.0 1.13.0 1.14.2 1.15.0
# Other PEFT versions likewise; 0.21.2 is the one in $(TRAINER).
PEFT_VERSIONS := 0.18.0 0.18.1 0.19.1 0.20.0 0.21.0
# What the tests of the ways of training need besides: two extras of the package, and what DeepSpeed imports. einops to
# py-cpuinfo are DeepSpeed's own requirements that $(TRAINER) lacks. The last is for a vLLM server with a 4-bit base.
LAUNCHERS := deepspeed==0.19.8 bitsandbytes==0.50.2 einops hjson msgpack py-cpuinfo vllm-bnb-plugin==0.0.3

# The Pythons of `make test-pythons`, each of which needs its interpreter.
PYTHONS := 3.10 3.12 3.13

.PHONY: help demo unit test test-colocate test-pythons lint docs bench venv venv-vllm venv-colocate trl-versions peft-versions launchers clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       train a tiny model against a real vLLM server, on this machine's CPU"
	@echo "make unit       the tests that need no server and start no process, in a minute and a half"
	@echo "make test       all tests, with a real vLLM server"
	@echo "make test-colocate  those of them with vLLM in the trainer's process"
	@echo "make test-pythons  the unit tests on other versions of Python"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the documentation, in site/, with its links checked"
	@echo "make bench      what one sync costs"
	@echo "make venv       the trainer's environment, $(TRAINER)"
	@echo "make venv-vllm  the vLLM server's environment, $(SERVER)"
	@echo "make venv-colocate  vLLM in the trainer's environment, $(COLOCATE)"
	@echo "make trl-versions  other TRL versions for the tests"
	@echo "make peft-versions  other PEFT versions for the tests"
	@echo "make launchers  DeepSpeed and bitsandbytes for the tests"
	@echo "make clean      remove all of the above and what they wrote"

# `make demo ARGS=--colocate` needs vLLM in the trainer's environment and no server.
IN_PROCESS := $(findstring --colocate,$(ARGS))

demo: $(if $(IN_PROCESS),venv-colocate,venv venv-vllm)
	@$(if $(IN_PROCESS),$(COLOCATE),$(TRAINER))/bin/python examples/demo/run.py $(ARGS)

unit: venv
	@$(TRAINER)/bin/python -m pytest $(AT_ONCE) tests/unit -m "not outside" $(ARGS)

# The colocate tests need vLLM in the trainer's environment, where the others must do without it. They come first, so that
# the output ends with the summary of the others.
test: venv venv-vllm venv-colocate trl-versions peft-versions launchers
ifeq ($(strip $(ARGS)),)
	@$(call twice,$(colocate),$(COLOCATE_AT_ONCE))
	@$(call twice,$(TRAINER)/bin/python -m pytest $(ALL_OTHERS),$(AT_ONCE))
else ifneq ($(findstring tests/colocate,$(ARGS)),)
	@$(COLOCATE)/bin/python -m pytest $(ARGS)
else
	@$(TRAINER)/bin/python -m pytest $(AT_ONCE) $(ARGS)
endif

# Named by the folder above: for each folder that is named, pytest reads the conftest.py before it starts the processes
# that run the tests. Some of those import TRL, which takes eight seconds of one core while the other waits.
ALL_OTHERS := tests --ignore tests/colocate

# With a separate cache for what failed.
colocate = $(COLOCATE)/bin/python -m pytest tests/colocate -o cache_dir=.pytest_cache/colocate

# A real server on a busy machine can miss a limit that it keeps otherwise. Tests that failed run once more, alone, and
# must pass then. The first output stays.
twice = $(1) $(2) || { echo "Once more, alone, what failed:"; $(1) --last-failed --last-failed-no-failures none; }

test-colocate: venv-colocate launchers
	@$(COLOCATE)/bin/python -m pytest tests/colocate $(COLOCATE_AT_ONCE) $(ARGS)

test-pythons: $(PYTHONS:%=test-python-%)

test-python-%: .pythons/%/.installed
	@.pythons/$*/bin/python -m pytest tests/unit $(ARGS)

.pythons/%/.installed: pyproject.toml tools/install_env.py
	@python$* tools/install_env.py any-trainer .pythons/$*
	@touch $@

lint: venv
	$(TRAINER)/bin/ruff check $(SOURCES)
	$(TRAINER)/bin/ruff format --check $(SOURCES)
	$(TRAINER)/bin/mypy

docs: venv
	@NO_MKDOCS_2_WARNING=1 $(TRAINER)/bin/python -m mkdocs build --strict --quiet

bench: venv venv-vllm
	@$(TRAINER)/bin/python benchmarks/sync_cost.py $(ARGS)

venv: $(TRAINER)/.installed
venv-vllm: $(SERVER)/.installed
venv-colocate: $(COLOCATE)/.installed

trl-versions: $(TRL_VERSIONS:%=.trl-versions/%/.installed)

# Unpacked without their dependencies, to be put in front of the one that is installed.
.trl-versions/%/.installed: | $(TRAINER)/.installed
	@echo "  TRL $* for the tests"
	@rm -rf .trl-versions/$*
	@$(TRAINER)/bin/python -m pip install --quiet --quiet --no-input --no-deps --target .trl-versions/$* trl==$*
	@touch $@

peft-versions: $(PEFT_VERSIONS:%=.peft-versions/%/.installed)

.peft-versions/%/.installed: | $(TRAINER)/.installed
	@echo "  PEFT $* for the tests"
	@rm -rf .peft-versions/$*
	@$(TRAINER)/bin/python -m pip install --quiet --quiet --no-input --no-deps --target .peft-versions/$* peft==$*
	@touch $@

launchers: .launchers/.installed

# In a separate folder, so that every other test shows that the package works without them. DeepSpeed would compile
# nothing then either, but looks for CUDA without DS_BUILD_OPS.
.launchers/.installed: Makefile | $(TRAINER)/.installed
	@echo "  DeepSpeed and bitsandbytes for the tests"
	@rm -rf .launchers
	@DS_BUILD_OPS=0 $(TRAINER)/bin/python -m pip install --quiet --quiet --no-input --no-deps --target .launchers $(LAUNCHERS)
	@touch $@

# Two stamps, so that a second run installs nothing and a change of what is installed is not missed.
$(TRAINER)/.installed: pyproject.toml tools/install_env.py
	@$(PYTHON) tools/install_env.py trainer $(TRAINER)
	@touch $@

$(SERVER)/.installed: tools/install_env.py
	@$(PYTHON) tools/install_env.py vllm $(SERVER)
	@touch $@

$(COLOCATE)/.installed: pyproject.toml tools/install_env.py $(SERVER)/.installed
	@$(PYTHON) tools/install_env.py colocate $(COLOCATE)
	@touch $@

clean:
	rm -rf $(TRAINER) $(SERVER) $(COLOCATE) .pythons .trl-versions .peft-versions .launchers demo-output site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
