# make demo     train, evaluate and sample a small model on this machine, in minutes
# make test     run the whole test suite
# make gpu      what needs a GPU: kernels native, speed at the papers' sizes -> out/gpu.json; under 10 minutes
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/pip install --disable-pip-version-check -c requirements.lock

.PHONY: venv demo test gpu clean

venv: .venv/ready

.venv/ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 10) and sys.exit("nanoDepth needs Python 3.10 or newer: make PYTHON=python3.X")'
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[plot]"
	@touch $@

.venv/ready-for-tests: .venv/ready
	$(PIP) -e ".[plot,test]"
	@touch $@

demo: venv
	$(BIN)/python prepare_data.py --demo
	$(BIN)/python train.py configs/demo.py
	$(BIN)/python eval.py loss out/demo --tokens 65536
	$(BIN)/python analyze.py curves out/demo
	$(BIN)/python analyze.py routes out/demo
	$(BIN)/python eval.py sample out/demo --prompt "    def test_" --num_samples 3 --max_new_tokens 200 \
	  --temperature 0.5 --top_p 0.9
	@echo
	@echo "Made: data/demo (the corpus), out/demo/log.jsonl (the losses), out/demo/ckpt/latest.pt (the model),"
	@echo "      out/demo/curves.png (the loss curve), out/demo/routes.png (the learned depth weights)."
	@echo "Next: $(BIN)/python eval.py sample out/demo --prompt 'def main('"
	@echo "      $(BIN)/python train.py configs/demo.py --residual=add --out_dir=out/add      # the plain residual; or =dar"
	@echo "      $(BIN)/python analyze.py curves out/demo out/add"

test: .venv/ready-for-tests
	$(BIN)/python -m pytest

gpu: .venv/ready-for-tests
	$(BIN)/python -m pytest tests/test_kernels.py
	for size in 100m 350m 1b; do \
	  $(BIN)/python bench.py kernels configs/mhar_$$size.py --json out/gpu.json && \
	  $(BIN)/python bench.py step configs/mhar_$$size.py --residuals=add,mhar --json out/gpu.json || exit 1; \
	done

clean:
	rm -rf .venv data/demo out/demo *.egg-info
