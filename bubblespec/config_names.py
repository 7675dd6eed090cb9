"""Names of keys in other trainers, for errors and docs/configuration.md.

config_names.json lists arguments of TRL (GRPOConfig, GRPOTrainer, ModelConfig and ScriptArguments),
keys of verl's trainer/config, and of vLLM. Words after a comma tell how the two differ; an answer
without a key of ours begins with "left out".
"""

import json
from pathlib import Path

TRL, VERL, VLLM = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")).values()

# Answers to an unknown key: by its whole name, or by the last part of it. Of equal last parts the
# first counts: `n` is that of the rollout, not of the evaluation.
LAST_PARTS = {name.rpartition(".")[2]: answer for name, answer in reversed(VERL.items())}
FOREIGN = VLLM | LAST_PARTS | VERL | TRL
