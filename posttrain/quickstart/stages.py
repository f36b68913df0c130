"""The settings of the three trainings, as files that a reader can change and run again with `posttrain train`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    worked: int = 27_000  # demonstrations that show their working
    bare: int = 9_000  # and that do not
    sft_steps: int = 1800
    problems: int = 2000  # answered for preference pairs
    samples: int = 6  # replies to each of them
    reward_steps: int = 100
    dpo_steps: int = 100
    held_out: int = 1000  # problems of the final measurement


def settings_files(folder: Path, seed: int, size: Size) -> dict[str, str]:
    """Name of each stage -> its YAML. Every setting that is not written has its default."""
    common = f"output_dir: {json.dumps(str(folder))}\nseed: {seed}\ndevices: {{type: cpu}}"
    return {
        "sft": f"""\
# Supervised fine-tuning: the model learns to write worked solutions by imitating them.
name: sft
{common}
model: {{path: "${{output_dir}}/model"}}
method: sft
data:
  source:
    - {{source: "builtin:arithmetic", max_rows: {size.worked}}}   # a worked solution to each problem
    - {{source: "${{output_dir}}/bare.jsonl"}}                # of other problems, the answer alone
  template: tags                       # the working between tags, then the solution between tags
  max_length: 128
  validation: {{rows: 200}}
training:
  batch_size: 20
  tokens_per_pack: 2048
  learning_rate: 2.5e-3                # high: a tiny model that starts from nothing
  adam_beta2: 0.95
  max_steps: {size.sft_steps}
evaluation: {{eval_steps: {max(1, size.sft_steps // 6)}}}
tracking: {{logging_steps: {max(1, size.sft_steps // 16)}}}
""",
        "reward": f"""\
# A reward model: learns from pairs which of two replies is better, and then scores any reply.
name: reward
{common}
model: {{path: "${{output_dir}}/sft/final"}}    # it starts from what SFT has learnt, with a new head
method: reward
data:
  source: "${{output_dir}}/pairs/train.jsonl"
  template: tags
  max_length: 128
  validation: {{source: "${{output_dir}}/pairs/test.jsonl"}}
training: {{batch_size: 32, tokens_per_pack: 2048, learning_rate: 1.0e-3, max_steps: {size.reward_steps}}}
evaluation: {{eval_steps: {max(1, size.reward_steps // 5)}}}
tracking: {{logging_steps: {max(1, size.reward_steps // 10)}}}
""",
        "dpo": f"""\
# DPO: makes the better reply of each pair more likely than the worse one, without a reward model.
name: dpo
{common}
model: {{path: "${{output_dir}}/sft/final"}}    # where it starts, and the reference it is compared with
method: {{type: dpo, loss_type: [sigmoid], beta: 1.0}}
data:
  source: "${{output_dir}}/pairs/train.jsonl"
  template: tags
  max_length: 128
  validation: {{source: "${{output_dir}}/pairs/test.jsonl"}}
training: {{batch_size: 32, tokens_per_pack: 2048, learning_rate: 1.0e-4, max_steps: {size.dpo_steps}}}
evaluation: {{eval_steps: {max(1, size.dpo_steps // 5)}}}
tracking: {{logging_steps: {max(1, size.dpo_steps // 10)}}}
""",
    }
