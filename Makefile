# One command for each thing one does here. Each sets up .venv by itself, so a fresh clone needs nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
DOCS_READY := $(VENV)/.ready-docs
NEWEST := .venv-newest
OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/.ready
CURVLINOPS := .curvlinops
RAY_DEFAULT := .ray-default
PEERS := .peers
TENSORFLOW := .venv-tensorflow
TENSORFLOW_READY := $(TENSORFLOW)/.ready
EXACTNESS := tests/procs/test_exact.py tests/procs/test_loader.py tests/procs/test_elastic_training.py \
	tests/unit/test_checkpoint_models.py tests/unit/test_checkpoint_optimizers.py tests/unit/test_order.py \
	tests/unit/test_overlap.py tests/unit/test_squared_norms.py tests/unit/test_tree.py
test-slurm := $(wildcard tests/*/test_slurm*.py tests/procs/test_study_engines.py)
test-ray := $(wildcard tests/*/test_ray*.py)
test-k8s := $(wildcard tests/*/test_k8s*.py)
LAB := unisono_lab|"(batch-size|chaos|curvature|page|replay|simulate|study|timeline)"
test-lab = $(shell grep -rlE --include='test_*.py' '$(LAB)' tests)
# Of pytest, each of which takes a gigabyte or two. Tests with processes wait for half of their time: with as many as two cores, a third
# of the processors' time passes unused.
PROCESSES ?= 5
SLURM := slurmctld slurmd slurm-client munge iproute2
QEMU := qemu-user
SSH := openssh-server openssh-client iproute2
BROWSER := chromium fonts-dejavu-core
FRAMEWORKS := $(wildcard $(foreach name,accelerat keras lightning transformers,tests/unit/test_$(name)*.py)) \
	tests/unit/test_float16_guests.py tests/unit/test_frameworks.py tests/unit/test_not_finite_guests.py tests/unit/test_run_of_script.py tests/procs/test_keras.py tests/procs/test_lightning.py

# Where this is set (in container images), each of the suite's thousand processes would compile the package again. What is
# kept lies in __pycache__, which git ignores.
unexport PYTHONDONTWRITEBYTECODE

# Compiling all that is installed takes longer than installing it. Most of it is never imported; what is, Python compiles then.
export PIP_COMPILE := 0

.PHONY: test-slurm test-ray test-k8s test-lab bench-fixed-cost bench-accelerators gpu-check help demo docs test check lint unit procs unit-and-procs again compiled slow alone bench bench-allreduce bench-shards bench-network bench-data-network bench-topologies bench-recovery bench-growth bench-elastic bench-guests bench-coordinator bench-coordinator-sockets bench-simulated-day bench-simulation bench-device-memory bench-second-order bench-monitor bench-timeline bench-checks flips bench-shuffles bench-sampling bench-numerics bench-accuracy bench-adaptive bench-disturbed bench-pinning bench-strategies bench-stale mutants soak chaos newest-torch oldest-frameworks with-tensorflow with-curvlinops with-ray-default test-peers nightly case-study slurm ssh qemu prometheus hosts format clean
.DELETE_ON_ERROR:

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

demo: $(READY)  ## train on digits, kill a worker, add two, and compare the weights with the serial run
	@$(BIN)/python examples/demo.py

test: unit-and-procs alone  ## the whole test suite

docs: $(DOCS_READY)  ## the documentation as a site, in site/
	@echo "==> documentation"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint unit  ## format, lint, types, layers, unit tests: before every commit

lint: $(READY)  ## format, lint, types
	@echo "==> format"
	@$(BIN)/ruff format --check --output-format concise .
	@echo "==> lint"
	@$(BIN)/ruff check --quiet .
	@echo "==> types"
	@$(BIN)/mypy

unit: $(READY)  ## layers and unit tests
	@echo "==> layers and unit tests"
	@$(BIN)/python -m pytest -m "unit and not slow" -n auto --dist loadgroup

procs: $(READY) accelerator slurm ssh prometheus browser  ## tests of whole jobs, on threads and with processes of their own
	@echo "==> tests of whole jobs"
	@$(BIN)/python -m pytest -m "not unit and not alone and not slow" -n $(PROCESSES) --dist loadgroup

slow: $(READY) accelerator slurm ssh qemu prometheus browser  ## more of them, which take longer than a change can wait
	@echo "==> slow tests"
	@$(BIN)/python -m pytest -m slow -n $(PROCESSES) --dist loadgroup

alone: $(READY) browser  ## tests of what is promised to happen in time
	@echo "==> tests of what is promised to happen in time"
	@$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' 'pytest.mark.alone' tests)

# Whole, slow tests too.
test-slurm: $(READY) slurm  ## all tests of Slurm jobs; test-ray, test-k8s, test-lab: likewise
test-ray test-k8s test-lab: $(READY)
test-lab: browser
test-slurm test-ray test-k8s test-lab:
	@$(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup $($@)

# Both of them in one go: what they import is imported once by each process, and none waits for the last test of the others.
unit-and-procs: $(READY) accelerator slurm ssh prometheus browser
	@echo "==> layers, unit tests, and tests of whole jobs"
	@$(BIN)/python -m pytest -m "not alone and not slow" -n $(PROCESSES) --dist loadgroup

again:  ## the tests that failed once more, with nothing beside them
	@PYTHONPATH=tests $(BIN)/python -m again

# Python compiles what is imported. Processes that import the same at the same time would each compile it. While pip installs
# what the documentation needs, the package cannot be imported for a moment.
compiled: $(READY) $(DOCS_READY) accelerator  ## have Python compile all that the tests import
	@echo "==> compiling what tests import"
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null

# g++ takes a minute or more, which no test should wait for. Without g++ its tests are left out.
.PHONY: accelerator
accelerator: $(READY)  ## compile the simulated accelerator of the tests
	@$(BIN)/python tests/simulated_accelerator.py

# The tests of Slurm jobs make a cluster of their own. Where systemd runs, installing would start Slurm's services as well.
slurm:  ## install Slurm for the tests of its jobs, as root on Debian or in a container of it; elsewhere they are left out
	@command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v srun >/dev/null && command -v ip >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ] \
			&& echo "==> installing Slurm (half a minute)" && apt-get -qq -o Acquire::Retries=1 update && RUNLEVEL=1 \
			DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $(SLURM) >/dev/null; } \
		|| echo "==> NO SLURM: the tests of its jobs are left out (on Debian: apt-get install $(SLURM))"

# Emulated processors, for the tests of portable numerics.
qemu:  ## install qemu's emulated processors, likewise
	@command -v qemu-x86_64 >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
			&& echo "==> installing qemu" && apt-get -qq -o Acquire::Retries=1 update \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $(QEMU) >/dev/null; } \
		|| echo "==> NO QEMU: the tests on emulated processors are left out (on Debian: apt-get install $(QEMU))"

# What a start of sshd would need is there without it: the tests start one of their own, in a network of its own.
ssh:  ## install sshd for the tests of hosts that are started over ssh, likewise
	@[ -x /usr/sbin/sshd ] && command -v ssh >/dev/null && command -v ip >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ] \
			&& echo "==> installing sshd" && apt-get -qq -o Acquire::Retries=1 update && RUNLEVEL=1 \
			DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $(SSH) >/dev/null; } \
		|| echo "==> NO SSHD: the tests of hosts over ssh are left out (on Debian: apt-get install $(SSH))"

# Its service is not started: the tests run a Prometheus of their own.
prometheus:  ## install Prometheus and promtool for the tests of /metrics and of the dashboard, likewise
	@command -v promtool >/dev/null && command -v prometheus >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ] \
			&& echo "==> installing Prometheus" && apt-get -qq -o Acquire::Retries=1 update && RUNLEVEL=1 \
			DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install prometheus >/dev/null; } \
		|| echo "==> NO PROMETHEUS: its tests are left out (on Debian: apt-get install prometheus)"

# The page is tested in Debian's own browser; Playwright, which drives it, would download another one.
.PHONY: browser bench-page pictures
browser:  ## install Chromium for the tests of the page, likewise
	@command -v chromium >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ] \
			&& echo "==> installing Chromium (half a minute)" && apt-get -qq -o Acquire::Retries=1 update \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $(BROWSER) >/dev/null; } \
		|| echo "==> NO CHROMIUM: the tests of the page in a browser are left out (on Debian: apt-get install $(BROWSER))"

hosts: $(READY) slurm ssh  ## what happens to jobs on several hosts, on each engine, as a table: some minutes; needs root
	@$(BIN)/python -m pytest -m hosts $(OPTIONS)

mutants: $(READY)  ## make mistakes in the membership and the hand-over, one by one: a test has to find each; half an hour
	@PYTHONPATH=tests $(BIN)/python -m mutants $(OPTIONS)

# OPTIONS goes to each of them: make bench OPTIONS="--model mlp --rounds 9"; OPTIONS=--help lists them all.
bench: $(BENCH_READY)  ## a training step beside the plain loop, DDP, Fabric, Accelerate: a quarter of an hour
	@$(BIN)/python -m benchmarks step $(OPTIONS)

bench-allreduce: $(BENCH_READY)  ## the all-reduce alone, beside Gloo and the memory's bandwidth
	@$(BIN)/python -m benchmarks allreduce $(OPTIONS)

bench-shards: $(BENCH_READY)  ## more shards than workers, exact beside native, one worker beside the plain loop
	@$(BIN)/python -m benchmarks shards $(OPTIONS)

bench-fixed-cost: $(BENCH_READY)  ## a step that computes next to nothing: the plain loop, DDP, Unisono on 1 and 2 workers with 1, 2 and 8 shards, in turns
	@$(BIN)/python -m benchmarks fixed-cost $(OPTIONS)

bench-accelerators: $(READY)  ## waits, copies and memory of a step on the simulated accelerator; needs g++
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.accelerators

gpu-check: $(READY)  ## what is promised, on one GPU in 8 minutes; without one: OPTIONS="--simulated --small", or "--device cpu --small"
	@PYTHONPATH=tests:tests/warm $(BIN)/python -m benchmarks.gpu_check $(OPTIONS)

bench-recovery: $(READY)  ## a worker is killed: how long the others stand still, how soon a new one takes part
	@$(BIN)/python -m benchmarks recovery $(OPTIONS)

bench-growth: $(READY)  ## workers come and go: how long the others stand still, what a start beside them costs
	@$(BIN)/python -m benchmarks growth $(OPTIONS)

bench-elastic: $(READY)  ## what it costs to be elastic while nobody comes or goes
	@$(BIN)/python -m benchmarks elastic $(OPTIONS)

bench-page: $(READY)  ## what it costs training that somebody looks at its page
	@$(BIN)/python -m benchmarks page $(OPTIONS)

pictures: $(READY) browser  ## the pictures of the page in the guide, of a job that is trained for them
	@$(BIN)/python -m benchmarks pictures $(OPTIONS)

bench-guests: $(READY)  ## a step of a framework that trains on a run, beside the same framework alone
	@$(BIN)/python -m benchmarks guests $(OPTIONS)

bench-coordinator: $(READY)  ## what the coordinator costs with 16 to 4096 workers, but for the sockets
	@$(BIN)/python -m benchmarks coordinator $(OPTIONS)

bench-simulated-day: $(READY)  ## unisono simulate's world for a day with 10 000 workers, of which 500 are killed
	@$(BIN)/python -m benchmarks simulated-day $(OPTIONS)

bench-coordinator-sockets: $(READY)  ## a coordinator with 1024 connections over TLS: memory, processor, delays, losses and joins
	@$(BIN)/python -m benchmarks coordinator-sockets $(OPTIONS)

bench-device-memory: $(READY)  ## the most memory that tensors take on a device: with the whole model, and where several hold it together
	@$(BIN)/python -m benchmarks device-memory $(OPTIONS)

bench-second-order: $(READY)  ## Muon on two workers, by everybody or by owners; what curvature costs; OPTIONS=--kfac: K-FAC beside SGD and AdamW
	@$(BIN)/python -m benchmarks second-order $(OPTIONS)

bench-disturbed: $(READY)  ## a worker or a connection becomes slow: what policies get back of what that costs; needs root
	@$(BIN)/python -m benchmarks disturbed $(OPTIONS)

bench-pinning: $(READY)  ## workers pinned to cores beside such that are not; OPTIONS="--busy 1": beside a busy process
	@$(BIN)/python -m benchmarks pinning $(OPTIONS)

bench-monitor: $(READY)  ## what it costs to measure the gradients' noise in every step
	@$(BIN)/python -m benchmarks monitor $(OPTIONS)

bench-timeline: $(READY)  ## what it costs to write down what each worker does when
	@$(BIN)/python -m benchmarks timeline $(OPTIONS)

bench-checks: $(READY)  ## what it costs to check the gradients' memory; --all: all of it; --audit: results; --state: weights and the rest; --finite: looks for NaN
	@$(BIN)/python -m benchmarks checks $(OPTIONS)

flips: $(READY)  ## 300 bits that flip at drawn places and moments: none may end in other weights
	@$(BIN)/python -m benchmarks flips $(OPTIONS)

bench-shuffles: $(READY)  ## the shuffle by blocks beside the full one, on a data set of compressed blocks
	@$(BIN)/python -m benchmarks shuffles $(OPTIONS)

bench-sampling: $(READY)  ## what reading only some blocks of the gradients does to the figures
	@$(BIN)/python -m benchmarks sampling $(OPTIONS)

bench-numerics: $(READY)  ## what portable numerics cost: operations and training steps beside native ones
	@$(BIN)/python -m benchmarks numerics $(OPTIONS)

bench-accuracy: $(BENCH_READY)  ## AdaScale at eight times the batch: accuracies beside the small one's and linear scaling's
	@$(BIN)/python -m benchmarks accuracy $(OPTIONS)

bench-adaptive: $(BENCH_READY)  ## a batch that follows the noise: how soon it is accurate, beside batches that stay
	@$(BIN)/python -m benchmarks adaptive $(OPTIONS)

bench-strategies: $(READY)  ## every synchronisation strategy: accuracy, traffic, throughput, in an hour; --slow: with a slow worker
	@$(BIN)/python -m benchmarks strategies $(OPTIONS)

soak: $(READY)  ## half an hour of faults: memory, files and threads stay as they are, and so do the bits
	@$(BIN)/python -m benchmarks soak $(OPTIONS)

bench-simulation: $(READY)  ## elastic jobs are recorded, and each is predicted from its first part
	@$(BIN)/python -m benchmarks simulation $(OPTIONS)

bench-stale: $(READY)  ## strategies while one worker is three times slower
	@$(BIN)/python -m benchmarks strategies --slow $(OPTIONS)

chaos: $(READY)  ## 200 faults on digits and 200 on char_lm: weights and samples as in runs without faults
	@rm -rf runs/chaos-digits runs/chaos-char_lm
	@$(BIN)/unisono chaos examples/digits.py --faults 200 --run-dir runs/chaos-digits $(OPTIONS) -- --epochs 40
	@$(BIN)/unisono chaos examples/char_lm.py --faults 200 --run-dir runs/chaos-char_lm $(OPTIONS)

# What pip lacks is installed in the versions of constraints.txt: only torch, and what torch needs, is new.
newest-torch:  ## the exactness matrix with the newest torch, in a venv of its own: 2 GB of disk, 6 with CUDA, and as much again for downloads
	@rm -rf $(NEWEST)
	@"$(PYTHON)" -m venv $(NEWEST)
	@PIP_CONSTRAINT=/dev/null $(NEWEST)/bin/python -m pip install --quiet --upgrade torch
	@$(NEWEST)/bin/python -m pip freeze | sed 's/==.*/==/; s/ @ .*/==/' > $(NEWEST)/new.txt
	@grep -vif $(NEWEST)/new.txt constraints.txt > $(NEWEST)/constraints.txt
	@PIP_CONSTRAINT=$(NEWEST)/constraints.txt $(NEWEST)/bin/python -m pip install --quiet -e '.[dev,examples]'
	@$(NEWEST)/bin/python -c 'import torch; print("==> torch", torch.__version__)'
	@$(NEWEST)/bin/python -m pytest -n 3 --dist loadgroup $(EXACTNESS) $(OPTIONS)

oldest-frameworks: $(OLDEST_READY)  ## the tests of Keras, Lightning, Transformers and accelerate with the oldest versions that are supported
	@$(OLDEST)/bin/python -m pip list 2>/dev/null | grep -iE '^(accelerate|keras|lightning|torch|transformers) '
	@$(OLDEST)/bin/python -m pytest -n 3 --dist loadgroup $(FRAMEWORKS) $(OPTIONS)

with-tensorflow: $(TENSORFLOW_READY)  ## the tests of Keras on tf.data and with its TensorBoard callback, for which tensorflow has to be there
	@KERAS_BACKEND=torch $(TENSORFLOW)/bin/python -m pytest -n 2 --dist loadscope $(wildcard tests/unit/test_keras_t*.py) $(OPTIONS)

with-curvlinops: $(READY)  ## curvature beside curvlinops, without torchvision, which it asks for and does not use
	@rm -rf $(CURVLINOPS)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(CURVLINOPS) -r constraints-curvlinops.txt
	@PYTHONPATH=$(CURVLINOPS) $(BIN)/python -m pytest tests/unit/test_curvature.py -k curvlinops $(OPTIONS)

with-ray-default: $(READY)  ## the figures of a job in Ray's own metrics, which need what ray[default] brings; needs root
	@rm -rf $(RAY_DEFAULT)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(RAY_DEFAULT) -r constraints-ray-default.txt
	@PYTHONPATH=$(CURDIR)/$(RAY_DEFAULT) $(BIN)/python -m pytest tests/procs/test_ray.py -k metrics $(OPTIONS)

test-peers: $(READY)  ## the tests that Keras and accelerate ship, alone and on a run, as tables
	@rm -rf $(PEERS)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(PEERS) -r constraints-peers.txt
	@PYTHONPATH=$(CURDIR)/$(PEERS):$(CURDIR)/tests $(BIN)/python -m peers
	@$(BIN)/python -m pytest tests/peers/accelerate_on_unisono.py $(OPTIONS)

nightly: $(BENCH_READY)  ## all that takes long, cheap things first, on through failures: most of a night; TARGETS="soak chaos" for some
	@.ci/nightly $(TARGETS)

bench-network: $(BENCH_READY)  ## how much of the communication is hidden over a slow network; needs root
	@$(BIN)/python -m benchmarks network $(OPTIONS)

bench-data-network: $(READY)  ## the network between hosts: Gloo, sockets of our own, these with TLS, a job that strangers call; needs root
	@$(BIN)/python -m benchmarks data-network $(OPTIONS)

bench-topologies: $(READY)  ## ring, tree, star, direct and a server over a slow network: predicted and measured; needs root
	@$(BIN)/python -m benchmarks topologies $(OPTIONS)

SMALL = --synthetic --samples 1280 --image-size 32 --width 0.25 --shards 2
case-study: $(READY)  ## how ResNet50V2 and ResNet152V2 scale, small, on one and two workers: a quarter of an hour
	@for model in resnet50v2 resnet152v2; do \
		$(BIN)/unisono study examples/resnet_cifar10.py --workers 1,2 --steps 20 --label $$model --out studies/$$model \
			--baseline "examples/resnet_cifar10.py --plain --model $$model --steps 20 $(SMALL)" $(OPTIONS) \
			-- --model $$model --steps 20 $(SMALL) || exit 1; \
	done
	@$(BIN)/unisono study compare studies/resnet50v2 studies/resnet152v2 --out studies/case-study

format: $(READY)  ## lay out the code and mend what ruff can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove .venv and all caches; what you trained stays
	@echo "==> removing $(VENV) and the caches"
	@rm -rf $(VENV) $(NEWEST) $(OLDEST) $(TENSORFLOW) $(CURVLINOPS) $(RAY_DEFAULT) $(PEERS) nightly .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is pinned in the very command that installs everything, or pip would fetch the newest build there is. As
# variables, the constraints also hold for the tools that build the package (the second name is for pip >= 25.3);
# their paths are relative because pip splits them at blanks.
$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "No '$(PYTHON)' found. Unisono needs Python 3.11 or newer; name yours: make PYTHON=python3.12" >&2; \
		exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "'$(PYTHON)' is $$("$(PYTHON)" --version 2>&1). Unisono needs Python 3.11 or newer;" \
			"name one: make PYTHON=python3.12" >&2; \
		exit 1; }
	@echo "==> installing into $(VENV) (once; PyTorch is large, this takes a few minutes)"
	@"$(PYTHON)" -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[accelerate,dev,examples,k8s,keras,lightning,mlflow,otel,plot,prometheus,ray,study,tensorboard,transformers,wandb]'
	@touch $@

$(OLDEST_READY): pyproject.toml constraints.txt constraints-oldest.txt
	@echo "==> installing the oldest versions of other frameworks into $(OLDEST)"
	@rm -rf $(OLDEST)
	@"$(PYTHON)" -m venv $(OLDEST)
	@sed -n 's/^\([a-z0-9-]*==\).*/^\1/p' constraints-oldest.txt > $(OLDEST)/others.txt
	@grep -vf $(OLDEST)/others.txt constraints.txt | cat - constraints-oldest.txt > $(OLDEST)/constraints.txt
	@PIP_CONSTRAINT=$(OLDEST)/constraints.txt PIP_BUILD_CONSTRAINT=$(OLDEST)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(OLDEST)/bin/python -m pip install --quiet -e '.[accelerate,dev,examples,keras,lightning,transformers]' pytorch-lightning
	@touch $@

$(TENSORFLOW_READY): pyproject.toml constraints.txt constraints-tensorflow.txt
	@echo "==> installing tensorflow beside torch into $(TENSORFLOW)"
	@rm -rf $(TENSORFLOW)
	@"$(PYTHON)" -m venv $(TENSORFLOW)
	@sed -n 's/^\([a-z0-9-]*==\).*/^\1/p' constraints-tensorflow.txt > $(TENSORFLOW)/others.txt
	@grep -vf $(TENSORFLOW)/others.txt constraints.txt | cat - constraints-tensorflow.txt > $(TENSORFLOW)/constraints.txt
	@PIP_CONSTRAINT=$(TENSORFLOW)/constraints.txt PIP_BUILD_CONSTRAINT=$(TENSORFLOW)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(TENSORFLOW)/bin/python -m pip install --quiet -e '.[dev,keras]' tensorflow-cpu tensorboard
	@touch $@

$(DOCS_READY): $(READY)
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

$(BENCH_READY): $(READY)
	@echo "==> installing what the benchmarks compare with"
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	@touch $@
